"""The import graph of made-up trees: what is a circle, what is upward, and what counts as a box."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.import_graph import boxes, circles, imports, largest_class, longest_function, read, report

if TYPE_CHECKING:
    from pathlib import Path

LAYERED = {
    "shop/__init__.py": "",
    "shop/prices.py": "",
    "shop/orders/__init__.py": "",
    "shop/orders/basket.py": "from shop.prices import price\nimport shop.prices\n",
    "shop/orders/invoice.py": "from shop.orders import basket\n\n\ndef send():\n    import shop.prices\n",
    "shop/main.py": "import asyncio\nfrom shop.orders.invoice import send\nfrom shop import prices\n"
    "class Shop: ...\n",
}


def tree(root: Path, **changes: str) -> None:
    """Write the layered tree with some modules changed: `orders__basket` names `shop/orders/basket.py`."""
    files = {**LAYERED, **{f"shop/{name.replace('__', '/')}.py": text for name, text in changes.items()}}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_layered_tree_has_no_circle_and_nothing_upward(tmp_path: Path) -> None:
    tree(tmp_path)
    graph = imports(read(tmp_path, ("shop",)))
    assert graph["shop.main"] == {"shop.orders.invoice", "shop.prices"}
    assert graph["shop.orders.invoice"] == {"shop.orders.basket", "shop.prices"}
    assert circles(graph) == []
    shop = boxes(graph, "shop")
    assert set(shop.graph) == {"shop.main", "shop.orders", "shop.prices"}
    assert shop.graph["shop.main"] == {"shop.orders", "shop.prices"}
    assert (shop.arrows, shop.upward()) == (3, [])
    assert boxes(graph, "shop.orders").graph["shop.orders.invoice"] == {"shop.orders.basket"}
    lines, is_good = report(read(tmp_path, ("shop",)))
    assert is_good
    assert lines[0] == "no circle among files, no circle among boxes, no upward import"


def test_a_circle_of_files_is_found_though_one_import_is_in_a_function_and_one_for_types(
    tmp_path: Path,
) -> None:
    tree(
        tmp_path,
        prices="def later():\n    from shop.main import run\n",
        orders__basket="if TYPE_CHECKING:\n    from shop.prices import Price\n",
    )
    modules = read(tmp_path, ("shop",))
    assert circles(imports(modules)) == [
        ["shop.main", "shop.orders.basket", "shop.orders.invoice", "shop.prices"]
    ]
    lines, is_good = report(modules)
    assert not is_good
    assert lines[0].startswith("circle of files: shop.main ")


def test_boxes_that_import_each_other_are_a_circle_though_no_files_are(tmp_path: Path) -> None:
    tree(tmp_path, prices="from shop.orders.coupon import worth\n", orders__coupon="")
    modules = read(tmp_path, ("shop",))
    graph = imports(modules)
    assert circles(graph) == []
    assert circles(boxes(graph, "shop").graph) == [["shop.orders", "shop.prices"]]
    assert boxes(graph, "shop").upward() == [
        ("shop.orders.basket", "shop.prices"),
        ("shop.orders.invoice", "shop.prices"),
        ("shop.prices", "shop.orders.coupon"),
    ]
    lines, is_good = report(modules)
    assert not is_good
    assert "upward import in shop: shop.prices imports shop.orders.coupon" in lines


def test_a_package_itself_is_a_box_where_it_imports(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "shop" / "__init__.py").write_text("from shop.prices import price\n")
    shop = boxes(imports(read(tmp_path, ("shop",))), "shop")
    assert set(shop.graph) == {"shop", "shop.main", "shop.orders", "shop.prices"}
    assert shop.graph["shop"] == {"shop.prices"}


def test_packages_that_import_each_other_are_a_circle(tmp_path: Path) -> None:
    for name, text in (("low", "import high.one\n"), ("high", "import low.two\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "one.py").write_text(text)
        (tmp_path / name / "two.py").write_text("")
    graph = imports(read(tmp_path, ("low", "high")))
    assert circles(graph) == []
    assert circles(boxes(graph, "").graph) == [["high", "low"]]


def test_the_longest_function_and_the_class_with_most_methods_are_named(tmp_path: Path) -> None:
    tree(
        tmp_path,
        main="class Shop:\n    def open(self):\n        return 1\n    def close(self): ...\n",
        prices="class Price:\n    def of(self): ...\n",
    )
    modules = read(tmp_path, ("shop",))
    assert longest_function(modules) == (2, "shop.orders.invoice:send")
    assert largest_class(modules) == (2, "shop.main:Shop")
