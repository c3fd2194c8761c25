# `make demo` and `make test` need Python 3.11 or newer and nothing else: they build .venv on first use.

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
STAMP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# What is imported is compiled once and kept; compiling all that is installed, at once, takes longer than all imports.
unexport PYTHONDONTWRITEBYTECODE
DEMO_MODEL := .demo/SmolLM2-135M-Instruct
CODE := $(wildcard src tests examples benchmarks tools)
# The system's Python may have the only torch that sees the GPU, so gpu-test and bench build no environment of their own.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

# Whatever hangs below an nn.Module is "Tensor | Module" to mypy, and tests look into modules all the time.
TESTS_ARE_LOOSE := $(addprefix --disable-error-code ,union-attr operator index arg-type assignment)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo docs test lint unit-test gpu-test simulated-gpu-test other-test soak gpu-soak coverage mutants bench stamp format install clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) $(DEMO_MODEL) ## have a language model answer within a fraction of its memory
	$(BIN)/python examples/demo.py --model $(DEMO_MODEL)

# One after the other, also under `make -j`: the cheap checks fail first.
test: ## everything that a change must pass: lint, then the tests that need no GPU
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit-test

lint: $(INSTALLED) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict --no-warn-unused-configs src
	$(BIN)/mypy --cache-dir .mypy_cache/tests $(TESTS_ARE_LOOSE) tests tools
	$(BIN)/lint-imports --no-logo

unit-test: $(INSTALLED) ## the tests that need no GPU; PYTEST_ARGS="-k name" for some of them
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout 300 $(PYTEST_ARGS)

gpu-test: ## the tests that need a CUDA device; fails where there is none
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -m "gpu and not soak" tests $(PYTEST_ARGS)

# The plugin compiles the device, and puts it there before torch is imported. Its tests are found by way of `tests`.
simulated-gpu-test: $(INSTALLED) ## the tests that need a CUDA device, on one that is simulated
	PYTHONPATH=src:tests $(BIN)/python -m pytest -p simulated_gpu.plugin -n $(WORKERS) --dist worksteal --timeout 300 \
		-m "gpu and not soak" tests $(PYTEST_ARGS)

# Everything but torch as in constraints.txt; setuptools comes as that torch wants it.
other-test: OTHER = .venv-$(TORCH)
other-test: ## the tests that need no GPU on another torch: TORCH=2.11.0, with PYTHON=python3.13 on another Python
	@test -n "$(TORCH)" || { echo "Say which torch: make other-test TORCH=2.11.0"; exit 1; }
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|setuptools)==' constraints.txt >$(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt torch==$(TORCH) -e '.[test]'
	$(OTHER)/bin/python -m pytest -n $(WORKERS) --dist worksteal --timeout 300 $(PYTEST_ARGS)

# Some of these last for ten minutes: a dump of their threads meanwhile, which they run on under, can end the process.
SOAKING := -o faulthandler_timeout=1500

soak: $(INSTALLED) ## the tests that take minutes: fuzzing by the hundred thousand
	$(BIN)/python -m pytest -n $(WORKERS) $(SOAKING) -m "soak and not gpu" $(PYTEST_ARGS)

gpu-soak: ## the same, of those that need a CUDA device
	PYTHONPATH=src $(GPU_PYTHON) -m pytest $(SOAKING) -m "gpu and soak" tests $(PYTEST_ARGS)

docs: $(INSTALLED) ## write docs/reference.md anew, from the docstrings
	$(BIN)/python tools/reference.py

coverage: $(INSTALLED) ## lines and branches that the tests without a GPU run; fails under the share in pyproject.toml
	$(BIN)/coverage erase
	COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/coverage run -m pytest -n $(WORKERS) --timeout 1200 $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

mutants: $(INSTALLED) ## small changes that no test notices; FILES="src/overspill/planner.py", SAMPLE=100 for some of them
	$(BIN)/python tools/mutants.py $(FILES) $(if $(SAMPLE),--sample $(SAMPLE))

bench: ## all benchmarks that this machine can run, into bench-results; BENCH_ARGS=--quick for small models
	$(GPU_PYTHON) benchmarks/all.py $(BENCH_ARGS)

stamp: ## which figures in README are older than the code; STAMP_ARGS="--measured inference" after a new measurement
	$(GPU_PYTHON) benchmarks/stamp.py $(STAMP_ARGS)

format: $(INSTALLED) ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(INSTALLED) ## build .venv, without running anything

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("overspill needs Python 3.11 or newer, not " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11 ...")'
	@test -x $(BIN)/pip || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing overspill and its tools into $(VENV): a few minutes the first time"
	@$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Converted once: a newer .venv makes no other model of it.
$(DEMO_MODEL): | $(INSTALLED)
	@$(BIN)/python examples/smollm2.py $@

clean: ## remove what make made
	rm -rf $(VENV) $(VENV)-* .demo .simulated_gpu bench-results .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +
