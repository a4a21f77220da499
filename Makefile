# Every target sets up .venv by itself; the first run downloads, later ones start at once.
# Without a GPU, PIP_EXTRA_INDEX_URL set to PyTorch's index of CPU wheels saves gigabytes.
PYTHON ?= python3
READY := .venv/.ready
BIN := .venv/bin
QUICK := "not slow and not soak and not chaos and not trainers"
JOBS := tests/e2e tests/elastic tests/scenarios

.PHONY: demo test test-jobs trainers test-trainers check lint stubs soak chaos bench bench-report clean

demo: $(READY)
	$(BIN)/reft-cli demo

test: lint
	$(BIN)/pytest -n 3 --dist worksteal --timeout=300 -m $(QUICK) $(JOBS:%=--ignore=%)

# Whole jobs wait for a third of their time, so three of them run at once on two cores. Files with a
# shared run stay together; other tests are distributed one by one (tests/e2e/conftest.py).
test-jobs: $(READY)
	$(BIN)/pytest -n 3 --dist loadfile --timeout=300 -m $(QUICK) $(JOBS)

# Each trainer has its own environment. Two run at a time, because ranks wait for one another.
trainers: $(READY)
	printf '%s\n' .ci/trainers/*.txt | xargs -P 2 -n 1 .ci/trainer

test-trainers: trainers
	$(BIN)/pytest -n 2 -m "trainers and not slow and not chaos"

# After each edit: tests without daemons and trainers, within a minute. The first run sets up an
# environment for the stubs.
check: lint
	$(BIN)/pytest -n 2 -m $(QUICK) tests/house tests/core tests/wire

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

stubs:
	.ci/stubs

# These two run the tests that are too long for the three targets above.
soak: trainers
	$(BIN)/pytest -m "soak or slow" --timeout=3600

chaos: trainers
	$(BIN)/pytest -m chaos --timeout=3600

bench: $(READY)
	$(BIN)/python bench/save.py

# Writes the tables of bench/README.md from the results in bench/results.
bench-report: $(READY)
	$(BIN)/python bench/report.py

clean:
	rm -rf .venv-stubs .venv-compat .venv-trainers build dist *.egg-info daemon/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch is on the same command line as the rest, so that pip never replaces the pinned version.
# The packages are prerequisites, because an editable install knows only the packages of its time.
$(READY): pyproject.toml .ci/constraints.txt $(wildcard reft/__init__.py daemon/*/__init__.py reft/client/memory/*.c)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c .ci/constraints.txt torch==2.13.0 -e '.[dev]'
	touch $@
