# Every target makes the environment it needs; when nothing changed that takes no time.

# What `make install` installs beside the package itself.
EXTRAS := embedded,asyncio,cli,client,django,http,spark,jdbc,delta,iceberg,test,dev,docs,bench
# Test processes; 0 runs the suite in one. Each has a server and a Spark of its own, and often waits for them: on two
# cores three are faster than two.
WORKERS ?= 3
# More arguments for pytest, for example: make test ARGS="-k claim"
ARGS ?=

# For an empty environment.
PATH ?= /usr/local/bin:/usr/bin:/bin
export PATH
# Tests start hundreds of Python processes: without bytecode each would compile all of Custody again.
unexport PYTHONDONTWRITEBYTECODE

# The first interpreter that is new enough; make PYTHON=… names another.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && { command -v $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# The oldest PySpark that is supported, and the environment with it: pyproject.toml says the range.
OLDEST_SPARK := 4.2.0
OLDEST := build/spark-$(OLDEST_SPARK)
# The name holds the extras, so that another list installs again.
STAMP := $(VENV)/.installed-$(EXTRAS)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-chaos test-long test-core test-pooler test-browser test-oldest-spark check lint format \
	docs bench coverage mutants audit outdated requirements interface tables async screenshots clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## Make .venv with everything that the other targets need

$(STAMP): pyproject.toml constraints.txt
	@if [ -z '$(PYTHON)' ] || ! '$(PYTHON)' -c '$(NEW_ENOUGH)' 2>/dev/null; then \
		echo "custody needs Python 3.11 or newer, and '$(or $(PYTHON),python3)' is not one." >&2; \
		echo "Name one that is: make PYTHON=/path/to/python3.11 install" >&2; \
		exit 1; \
	fi
	@echo "Installing custody[$(EXTRAS)] into $(VENV) (the first time takes a minute or two) …"
	@'$(PYTHON)' -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@rm -f $(VENV)/.installed-*
	@touch '$@'

demo: install ## Run the stock example
	@$(BIN)/custody demo

test: install ## Run the test suite on the embedded PostgreSQL
	@$(PYTEST) -q -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m 'not chaos and not slow and not long and not pooler and not browser' $(ARGS)

test-chaos: install ## Run what kills or breaks processes, drivers, sinks and connections, or waits for real timeouts
	@$(PYTEST) -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'chaos and not slow and not long and not pooler and not browser' $(ARGS)

test-long: install ## Run the whole suite, volume and chaos runs included
	@$(PYTEST) -q $(ARGS)

test-core: install ## Run the core part on the server that CUSTODY_TEST_DATABASE names
	@if [ -z "$$CUSTODY_TEST_DATABASE" ]; then \
		echo "Set CUSTODY_TEST_DATABASE=postgresql://… to the server to test on." >&2; \
		exit 1; \
	fi
	@$(PYTEST) -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'core and not chaos and not slow and not long and not browser' $(ARGS)

test-pooler: install ## Run what is behind a connection pooler (needs PgBouncer)
	@$(PYTEST) -q -m 'pooler and not slow and not long' tests/pooler $(ARGS)

test-browser: install ## Run the tests of the dashboard in a browser (needs Chromium)
	@$(PYTEST) -q -m 'browser and not slow and not long' tests/browser $(ARGS)

test-oldest-spark: install $(OLDEST)/.installed ## Run the core of the tests on Spark with the oldest PySpark
	@$(OLDEST)/bin/python -m pytest -q -m 'not chaos and not slow and not long' \
		tests/spark/test_checkpoint_files.py tests/spark/test_pipeline.py tests/spark/test_source.py tests/spark/test_sink.py $(ARGS)

# Everything but PySpark is that of .venv.
$(OLDEST)/.installed: $(STAMP)
	@echo "Installing PySpark $(OLDEST_SPARK) into $(OLDEST) …"
	@$(BIN)/python -m venv --clear $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'pyspark==$(OLDEST_SPARK)'
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"
	@touch '$@'

check: lint test test-chaos ## Run everything that has to pass before a commit: lint, format, types, layers, tests

lint: install ## Check style, format, types and layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-logo

format: install ## Put the code into the house format and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: install ## Build the documentation site into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

bench: install ## Measure, beside bare PostgreSQL and its peers
	@$(BIN)/python -m bench $(ARGS)

coverage: install ## Measure how much of src/custody the tests execute, by folder (ARGS=--publish: into docs/coverage.md)
	@$(BIN)/python scripts/measure_coverage.py --workers $(WORKERS) $(ARGS)

audit: ## Look for known vulnerabilities in the pinned versions (needs the network; 2 if it could not look)
	@'$(PYTHON)' scripts/pins.py audit

outdated: install ## List pinned versions that have newer releases (needs the network; 2 if it could not look)
	@$(BIN)/python scripts/pins.py outdated

mutants: install ## Remove one fence at a time from the SQL functions and see whether a test notices
	@CUSTODY_PROPERTY_EXAMPLES=$${CUSTODY_PROPERTY_EXAMPLES:-2} $(BIN)/python scripts/mutants.py $(ARGS)

requirements: install ## Write docs/requirements.md anew from the marks on the tests
	@$(BIN)/python scripts/requirements.py

interface: install ## Write what the code of this release calls, when the release is made
	@$(BIN)/python scripts/interface.py

tables: install ## Write the tables of the docs anew that are made of the code
	@$(BIN)/python scripts/tables.py

screenshots: install ## Take the screenshots of docs/dashboard.md anew (needs Chromium)
	@$(BIN)/python -m tests.browser.screenshots

async: install ## Write src/custody/aio/derived anew from the blocking verbs
	@$(BIN)/python scripts/async_surface.py

clean: ## Remove .venv, builds and caches (never .custody, which holds data)
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -path ./.custody -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
