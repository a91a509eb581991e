# Two commands for everybody: `make demo` and `make test`. Both work in a clean clone.

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin

# cuPyNumeric has wheels for Linux on x86-64; elsewhere its tests are skipped and say so. The wheels are linked to the
# NVIDIA driver's library even where they run on the CPU: where there is no driver, the tests load a stand-in.
ifeq ($(shell uname -sm),Linux x86_64)
EXTRAS := test,dev,plot,cupynumeric
STUB := build/libcuda.so.1
export LMFIT_GPU_LIBCUDA := $(CURDIR)/$(STUB)
export LMFIT_GPU_REQUIRE_CUPYNUMERIC := 1
else
EXTRAS := test,dev,plot
STUB :=
endif

# -qq: errors only. Some machines list package folders that do not exist, and pip warns of each, each time.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: help demo test lint format validate validate-cupynumeric stub bench clean

help:
	@echo "make demo      fit a real curve and a small network, with plots (under a minute)"
	@echo "make test      ruff, mypy, then every test and doctest;  PYTEST_ARGS='-k house' to choose"
	@echo "make validate  the 27 NIST StRD problems from both starts"
	@echo "make validate-cupynumeric   the same on the cuPyNumeric backend (Linux on x86-64)"
	@echo "make stub      the stand-in for a missing NVIDIA driver that the tests load"
	@echo "make bench     the timing and memory tests in tests/benchmarks"
	@echo "make lint      ruff and mypy only"
	@echo "make format    let ruff rewrite the files"
	@echo "make clean     remove .venv, caches and build products"
	@echo "PYTHON=python3.12 make ... chooses the interpreter (3.11 or newer)"

demo: $(VENV)/installed-run
	$(BIN)/python -m lmfit_gpu demo

validate: $(VENV)/installed-run
	$(BIN)/python -m lmfit_gpu validate

# LEGATE_CONFIG unset: what plain Python does is what is tested.
validate-cupynumeric: $(VENV)/installed-test $(STUB)
	env -u LEGATE_CONFIG $(BIN)/python -m lmfit_gpu validate --backend cupynumeric

stub: $(STUB)

build/libcuda.so.1: tests/libcuda_stub.c
	@mkdir -p build
	$(CC) -shared -fPIC -O1 -Wl,-soname,libcuda.so.1 -o $@ $<

# Two processes of one thread each: half the time on two cores, and Legate reserves its share of memory in each.
test: lint $(STUB)
	env -u LEGATE_CONFIG OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The files there are called bench_*.py, so a plain pytest run passes them by.
bench: $(VENV)/installed-test $(STUB)
	env -u LEGATE_CONFIG $(BIN)/python -m pytest tests/benchmarks -o python_files='bench_*.py' -o norecursedirs='.*' $(PYTEST_ARGS)

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
	@$(INSTALL) -e '.[$(EXTRAS)]'
	@touch $@ $(VENV)/installed-run
