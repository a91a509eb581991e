# Two commands for everybody: `make demo` and `make test`. Both work in a clean clone.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# -qq: errors only. Some machines list package folders that do not exist, and pip warns of each, each time.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: help demo test lint format validate bench clean

help:
	@echo "make demo      fit a real curve and a small network, with plots (under a minute)"
	@echo "make test      ruff, mypy, then every test and doctest;  PYTEST_ARGS='-k house' to choose"
	@echo "make validate  the 27 NIST StRD problems from both starts"
	@echo "make bench     the timing and memory tests in tests/benchmarks"
	@echo "make lint      ruff and mypy only"
	@echo "make format    let ruff rewrite the files"
	@echo "make clean     remove .venv, caches and build products"
	@echo "PYTHON=python3.12 make ... chooses the interpreter (3.11 or newer)"

demo: $(VENV)/installed-run
	$(BIN)/python -m lmfit_gpu demo

validate: $(VENV)/installed-run
	$(BIN)/python -m lmfit_gpu validate

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The files there are called bench_*.py, so a plain pytest run passes them by.
bench: $(VENV)/installed-test
	$(BIN)/python -m pytest tests/benchmarks -o python_files='bench_*.py' -o norecursedirs= $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks
	find lmfit_gpu tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps. Each is touched only after its recipe succeeded, so an interrupted install is done again.
$(VENV)/created:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) else \
	"lmfit_gpu needs Python 3.11 or newer; $(PYTHON) is " + v + ". Try: make PYTHON=python3.11 ...")'
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed-run: $(INPUTS) | $(VENV)/created
	@echo "==> installing lmfit_gpu with its plots into $(VENV) (the first time takes a minute or two)"
	@$(INSTALL) -e '.[plot]'
	@touch $@

# What the tests install contains what a run needs, hence both stamps.
$(VENV)/installed-test: $(INPUTS) | $(VENV)/created
	@echo "==> installing lmfit_gpu with its test and lint tools into $(VENV) (the first time takes a minute or two)"
	@$(INSTALL) -e '.[test,dev,plot]'
	@touch $@ $(VENV)/installed-run
