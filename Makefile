# What a person types here; each target makes its own environment first, in .venv.
#
#   make demo     three bookies, a real file, one bookie killed on the way, read back and compared
#                 FILE=path          stream this file (default: the standard library's sources, 30 MB)
#                 METADATA=zk        a real three-server ZooKeeper ensemble instead of the embedded store
#                 KILL_ZK_LEADER=1   ... whose leader is killed midway
#                 NO_SPARE=1         no spare bookie: writing goes on at the ack quorum
#   make test     all tests             ARGS="tests/metadata -x" is handed to pytest
#   make test-versions   all tests on every other Python found (3.11 to 3.14)    ARGS as for `make test`
#   make wheel    a wheel for this Python whose hot paths are compiled, into dist/ (docs/WHEELS.md)
#   make test-wheel   units, integration and 200 seeds on such a wheel; QUICK=1 for fewer tests
#                 ARGS="tests/cli -x" runs these tests on it
#   make check    format, lint, types as Python 3.11 and 3.14 have them, layering, import circles
#   make sim      whole clusters from seeds (docs/SIMULATION.md): SEEDS=200 PROFILE=name START=0,
#                 SEED=n replays one seed, SHRINK=1 with it cuts a failing one down
#   make sim-campaign    SEEDS=n more seeds of the campaign of this code, which begins at START
#   make sim-versions    the same seeds on every Python found (3.11 to 3.14): the verdicts must agree
#   make crash-states    what a power cut may leave of the storage engine's writes, one after another
#   make mutants  plants bugs, one after another, and reports which are caught
#   make bench    the product measured from all sides (docs/BENCHMARKS.md)   ARGS="closed tail --seconds 5"
#   make bench-write   writing beside the disk and the ceiling, minutes      ARGS=... is handed on
#   make bench-peers   beside Apache BookKeeper, Kafka and NATS (needs Maven and a JDK; hours)   ARGS=... is handed on
#   make clean    remove the environment and everything that was built
#
# PYTHON=/path/to/python names the interpreter the environment is made with (3.11 or newer). Without it, one that
# was built optimised is preferred, such as the distribution's own.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
export PYTHON
# Each test starts processes, which would compile every module again where bytecode is not kept.
export PYTHONDONTWRITEBYTECODE :=

demo_arguments := $(if $(FILE),--file "$(FILE)") $(if $(METADATA),--metadata $(METADATA)) \
	$(if $(filter-out 0,$(NO_SPARE)),--no-spare) $(if $(filter-out 0,$(KILL_ZK_LEADER)),--kill-zookeeper-leader)
demo_needs := $(if $(filter zk,$(METADATA)),spark,plain)
# Evaluated in a recipe, once the environment exists: Java may have to come out of it.
java := JAVA_HOME="$$(.ci/java $(VENV))" && export JAVA_HOME

.PHONY: help demo test test-versions wheel test-wheel check check-style check-types check-types-3.14 check-house \
	sim sim-campaign sim-versions crash-states mutants bench bench-write bench-peers clean
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# One stamp per set of extras: installed again only when pyproject.toml changed.
$(VENV)/plain.stamp: pyproject.toml
	@.ci/environment $(VENV)
	@touch $@

$(VENV)/%.stamp: pyproject.toml
	@.ci/environment $(VENV) $*
	@touch $@

demo: $(VENV)/$(demo_needs).stamp
	@$(if $(filter zk,$(METADATA)),$(java) &&) $(BIN)/python examples/demo.py $(demo_arguments) $(ARGS)

test: $(VENV)/dev.stamp
	@$(java) && $(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

test-versions: $(VENV)/dev.stamp
	@$(java) && $(BIN)/python -m tests.support.pythons $(ARGS)

wheel: $(VENV)/compile.stamp
	@BOOKIE_AIO_COMPILE=1 $(BIN)/python -m build --wheel --no-isolation

test-wheel: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.support.wheel $(if $(QUICK),--quick) $(ARGS)

# Two at a time: mypy takes most of it, once for each version of the types.
check: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory -j 2 check-types check-types-3.14 check-style check-house

check-style: $(VENV)/dev.stamp
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

check-types: $(VENV)/dev.stamp
	@$(BIN)/mypy

check-types-3.14: $(VENV)/dev.stamp
	@$(BIN)/mypy --python-version 3.14

check-house: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest -q tests/test_layering.py tests/test_tidy.py
	@$(BIN)/python -m benchmarks.import_graph

bench: $(VENV)/bench.stamp
	@$(BIN)/python -m benchmarks.suite $(ARGS)

bench-write: $(VENV)/bench.stamp
	@$(BIN)/python -m benchmarks.write $(ARGS)

bench-peers: $(VENV)/bench.stamp
	@$(java) && $(BIN)/python -m benchmarks.peers $(ARGS)

sim: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.sim $(if $(PROFILE),--profile $(PROFILE)) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(START),--start $(START)) $(if $(SEED),--seed $(SEED) --timeline) $(if $(SHRINK),--shrink) $(ARGS)

sim-campaign: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.sim --campaign docs/simulation-campaign.json --seeds $(or $(SEEDS),5000) \
		$(if $(START),--start $(START)) $(ARGS)

sim-versions: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.sim.campaign.verdicts $(if $(SEEDS),--seeds $(SEEDS)) $(if $(START),--start $(START)) $(ARGS)

crash-states: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.sim.crash $(ARGS)
	@$(BIN)/python -m tests.sim.crash --chains $(ARGS)

mutants: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.sim.mutants $(ARGS)

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "clean: removed $(VENV), builds and caches"
