# make quickstart   set up .venv, train the tiny model, print the result and where the report is
# make test         set up .venv, run the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: quickstart test setup lint types check clean

quickstart: $(VENV)/.cpu
	$(BIN)/reprise run examples/quickstart/config.yaml

test: $(VENV)/.dev
	$(BIN)/python -m pytest

setup: $(VENV)/.cpu

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

check: lint types test

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Reprise needs Python 3.11 or newer; this is %d.%d. Name one: make PYTHON=python3.11 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)

# torch brings its own dependencies; everything else comes from the lock, so that the result is the
# same every time.
$(VENV)/.cpu: requirements/cpu.lock pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q --no-deps -r requirements/cpu.lock
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.dev: requirements/dev.lock $(VENV)/.cpu
	$(BIN)/pip install -q --no-deps -r requirements/dev.lock
	touch $@

clean:
	rm -rf $(VENV)
