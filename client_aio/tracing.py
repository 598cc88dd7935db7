"""OpenTelemetry spans of the calls of a client. It needs the extra `[otel]`.

    import client_aio.tracing

    async with client_aio.connect(uri) as client:
        client_aio.tracing.trace(client)

Owns which calls have a span, and the span's name and attributes. `trace` replaces these methods on one
client, and on each handle that the client opens from then on. A client that is not traced runs no line of
this module.

A span's name is the method: `bookie.create_ledger`, `bookie.log.flush`. Attributes are

    bookie.ledger_id, bookie.log    of the call's argument, or of the handle
    bookie.outcome                      of an error: "not done" or "unknown"

Opening a handle is one span, up to the handle. A stream of entries is one span, from its first item on. A
`close` that flushes has the flush as its child.
"""

from __future__ import annotations

from contextlib import aclosing, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanKind, StatusCode, get_tracer, use_span

from client_aio.handles import AwaitableContext
from metadata.errors import BookKeeperError, InvalidArgumentError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

    from opentelemetry.trace import Span, Tracer

    from client_aio.client import Client

_PREFIX = "bookie"

CALLS = (
    "delete_ledger", "repair_ledger", "ledger_replicas", "ledger_metadata", "create_log", "truncate_log",
    "delete_log", "log_metadata", "add_to_log", "sweep_log_orphans", "create_unbounded_ledger",
    "trim_unbounded_ledger",
)  # fmt: skip
"""Coroutines of a client."""
OPENINGS = {
    "create_ledger": "ledger",
    "open_ledger": "ledger",
    "open_log": "log",
    "open_unbounded_ledger": "ledger",
}
"""Calls that open a handle, and the noun of the handle in the names of its spans."""
STREAMS = ("read_log", "read_log_batches", "read_unbounded_ledger")
HANDLE_CALLS = (
    "flush", "force", "close", "add_entries", "roll", "trim", "refresh", "read_last_add_confirmed",
    "try_read_last_add_confirmed",
)  # fmt: skip
HANDLE_STREAMS = ("read", "read_batches", "read_unconfirmed", "read_rest", "tail", "tail_batches")
HANDLE_ADDS = ("add_entry", "add_batch", "append", "append_batch")

Attributes = dict[str, str | int]


def trace(client: Client, *, tracer: Tracer | None = None, adds: bool = False) -> None:
    """Have the calls of a client, and of each handle that it opens from now on, make spans.

    Args:
        tracer: None stands for the one of the default provider.
        adds: each `add_entry`, `append` and batch makes a span as well, up to the acknowledgement. That costs
            some microseconds, and is for few and large entries.

    Raises:
        InvalidArgumentError: the client is traced already.
    """
    if "_is_traced" in vars(client):
        raise InvalidArgumentError("this client is traced already")
    spans = _Spans(tracer or get_tracer("bookie-aio"), adds=adds)
    vars(client)["_is_traced"] = True
    for name in CALLS:
        _replace(client, name, spans.coroutine(name))
    for name in STREAMS:
        _replace(client, name, spans.stream(name))
    for name, noun in OPENINGS.items():
        _replace(client, name, spans.opening(name, noun))


def _replace(owner: object, name: str, wrapped: Callable[[Any], Any]) -> None:
    """Replace a method on one object. Its class, and all other objects, stay as they are."""
    method = getattr(owner, name, None)
    if method is not None:
        vars(owner)[name] = wraps(method)(wrapped(method))


def _attributes(name: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Attributes:
    """Return the ledger or the log that a call of a client is about: its first argument."""
    first = arguments[0] if arguments else options.get("ledger_id", options.get("name"))
    if isinstance(first, int) and "log" not in name:
        return {f"{_PREFIX}.ledger_id": first}
    if isinstance(first, str):
        return {f"{_PREFIX}.{'log' if 'log' in name else 'ledger'}": first}
    return {}


def _attributes_of(handle: Any) -> Attributes:
    """Return the ledger or the log of a handle."""
    name = getattr(handle, "name", None)
    if isinstance(name, str):
        return {f"{_PREFIX}.log": name}
    return {f"{_PREFIX}.ledger_id": handle.ledger_id}


def _fail(span: Span, error: BaseException) -> None:
    if isinstance(error, BookKeeperError):
        span.set_attribute(f"{_PREFIX}.outcome", error.outcome.value)
    if isinstance(error, Exception):
        span.record_exception(error)
        span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
    else:  # a cancellation
        span.set_status(StatusCode.ERROR, type(error).__name__)


class _Spans:
    """Wraps methods, so that each call has a span."""

    def __init__(self, tracer: Tracer, *, adds: bool) -> None:
        self._tracer = tracer
        self._adds = adds

    def _begin(self, name: str, attributes: Attributes) -> Span:
        return self._tracer.start_span(f"{_PREFIX}.{name}", kind=SpanKind.CLIENT, attributes=attributes)

    @contextmanager
    def _span(self, name: str, attributes: Attributes) -> Iterator[Span]:
        span = self._begin(name, attributes)
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield span
            except BaseException as error:
                _fail(span, error)
                raise

    def coroutine(self, name: str, handle: Any = None) -> Callable[[Any], Any]:
        """Wrap a coroutine function."""

        def wrap(method: Any) -> Any:
            async def call(*arguments: Any, **options: Any) -> Any:
                about = _attributes(name, arguments, options) if handle is None else _attributes_of(handle)
                with self._span(name, about):
                    return await method(*arguments, **options)

            return call

        return wrap

    def stream(self, name: str, handle: Any = None) -> Callable[[Any], Any]:
        """Wrap what returns an async generator. The span is current only while the stream itself runs."""

        def wrap(method: Any) -> Any:
            async def traced(stream: Any, about: Attributes) -> AsyncGenerator[Any, None]:
                span = self._begin(name, about)
                count = 0
                try:
                    async with aclosing(stream):
                        while True:
                            try:
                                with use_span(span, record_exception=False, set_status_on_exception=False):
                                    item = await anext(stream)
                            except StopAsyncIteration:
                                return
                            count += 1
                            yield item
                except Exception as error:
                    _fail(span, error)
                    raise
                finally:
                    span.set_attribute(f"{_PREFIX}.items", count)
                    span.end()

            def call(*arguments: Any, **options: Any) -> Any:
                about = _attributes(name, arguments, options) if handle is None else _attributes_of(handle)
                return traced(method(*arguments, **options), about)

            return call

        return wrap

    def opening(self, name: str, noun: str) -> Callable[[Any], Any]:
        """Wrap what returns an opening. Its handle is traced, too."""

        def wrap(method: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                opening = method(*arguments, **options)

                async def start() -> Any:
                    with self._span(name, _attributes(name, arguments, options)) as span:
                        handle = await opening
                        span.set_attributes(_attributes_of(handle))
                    self.handle(handle, noun)
                    return handle

                return AwaitableContext(start)

            return call

        return wrap

    def handle(self, handle: Any, noun: str) -> None:
        """Trace the calls of a handle."""
        for name in HANDLE_CALLS:
            _replace(handle, name, self.coroutine(f"{noun}.{name}", handle))
        for name in HANDLE_STREAMS:
            _replace(handle, name, self.stream(f"{noun}.{name}", handle))
        if self._adds:
            for name in HANDLE_ADDS:
                _replace(handle, name, self._add(f"{noun}.{name}", handle))

    def _add(self, name: str, handle: Any) -> Callable[[Any], Any]:
        """Wrap what returns a future. The span ends when the future is done."""

        def wrap(method: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                span = self._begin(name, _attributes_of(handle))

                def done(future: asyncio.Future[Any]) -> None:
                    if future.cancelled():
                        span.set_status(StatusCode.ERROR, "CancelledError")
                    elif (error := future.exception()) is not None:
                        _fail(span, error)
                    span.end()

                try:
                    future = method(*arguments, **options)
                except Exception as error:
                    _fail(span, error)
                    span.end()
                    raise
                future.add_done_callback(done)
                return future

            return call

        return wrap
