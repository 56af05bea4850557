# Everything runs in .venv; `make setup` makes it and every other target asks for it.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
ARGS ?=
# Two processes run the default tests, a file at a time; more only fight for the cores.
WORKERS ?= -n 2 --dist loadfile

# One folder with a pyproject.toml = one distribution. A new room is found by itself.
PYPROJECTS := $(sort $(wildcard core/pyproject.toml layers/pyproject.toml loaders/*/pyproject.toml plugins/*/pyproject.toml))
MEMBERS := $(PYPROJECTS:/pyproject.toml=)
INPUTS := pyproject.toml $(PYPROJECTS) constraints.txt requirements-dev.txt requirements-no-deps.txt
# The stamp's name holds the content of these files: a changed file or a new room sets up again.
STAMP := $(VENV)/.setup-$(shell cat $(INPUTS) | cksum | tr -d ' ')

.PHONY: help setup test test-all check format bench docs demo clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -e 's/:.*##/\t/'

setup: $(STAMP)  ## make .venv and install everything into it (does nothing when nothing changed)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say PYTHON=/path/to/it")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt numpy
	$(PIP) install --quiet -c constraints.txt -r requirements-dev.txt
	$(PIP) install --quiet -c constraints.txt --no-deps -r requirements-no-deps.txt
	$(PIP) install --quiet -c constraints.txt --no-build-isolation $(addprefix -e ,$(MEMBERS)) -e .
	@rm -f $(VENV)/.setup-*
	@touch $(STAMP)

test: setup  ## the tests, with wheels of everything installed into clean environments
	$(PY) -m pytest -q $(WORKERS) $(ARGS)

test-all: test  ## and the slow and large ones
	$(PY) -m pytest -q $(WORKERS) -m "slow or large"

check: setup  ## ruff, its formatter, mypy strict over all members
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup  ## put the code into shape
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup  ## the benchmarks, as ratios of one run (ARGS="--small" for CI's size)
	$(PY) tests/benchmarks/run_all.py $(ARGS)

docs: setup  ## the pages, into site/; a broken link or name fails
	$(PY) -m zensical build --strict

demo: setup  ## plan and load MiniLM and SmolLM2, and compare with stored oracles
	$(PY) scripts/demo.py $(ARGS)

clean:  ## remove what builds and tests left (not .venv)
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find core layers loaders plugins tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
