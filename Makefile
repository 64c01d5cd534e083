# Two commands need nothing but Python 3.11, venv, make and PyPI: `make test` and `make demo`.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# The tests are small: more threads than one only cost time, and never the network.
test lint: export OMP_NUM_THREADS ?= 1
test lint: export HF_HUB_OFFLINE ?= 1
# pyright is a Node program; its wheel and Node's come pinned from PyPI, so nothing else may be fetched.
test lint: export PYRIGHT_PYTHON_IGNORE_WARNINGS ?= 1

.PHONY: help test lint format results demo clean
.DEFAULT_GOAL := help

help:
	@echo "make test    lint, types and every test (installs into $(VENV) first)"
	@echo "make demo    fetch a small real model, decode with and without a draft, train a tiny draft"
	@echo "make lint    ruff and pyright only"
	@echo "make format  let ruff rewrite the sources"
	@echo "make results rewrite the tables and figures of the documents from the records in docs/results"
	@echo "make clean   remove $(VENV) and what the tools left behind"

# One stamp: reinstalled only when a pin or the package's metadata changes.
$(STAMP): requirements/cpu.txt pyproject.toml
	@echo "Installing into $(VENV) (about 1.5 GB on disk; a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --requirement requirements/cpu.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

test: lint
	@$(BIN)/python -m pytest

results: $(STAMP)
	@$(BIN)/paceline results README.md docs/results.md src/paceline/shipped/*/measured.json

demo: $(STAMP)
	@$(BIN)/paceline demo

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
