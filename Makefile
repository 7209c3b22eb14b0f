# Every target sets up what it needs, in a virtual environment named after the Python
# version: `make test PYTHON=python3.12`. JAX=0.11.2 pins jax, in an environment of its own.

PYTHON ?= python3
JAX ?=
WORKERS ?= auto

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(PYTHON_VERSION),)
$(error '$(PYTHON)' does not run; name a Python >= 3.11 with PYTHON=...)
endif

VENV ?= .venv-$(PYTHON_VERSION)$(if $(JAX),-jax$(JAX))
BIN := $(VENV)/bin
JAX_PIN := $(if $(JAX),'jax==$(JAX)')

# The tests use libtpu as a compiler; unasked, it looks for a TPU and says so at length,
# and locks it against other processes.
export JAX_PLATFORMS ?= cpu
ifeq ($(findstring tpu,$(JAX_PLATFORMS)),)
export ALLOW_MULTIPLE_LIBTPU_LOAD ?= 1
export TPU_SKIP_MDS_QUERY ?= 1
export TPU_WORKER_HOSTNAMES ?= localhost
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two targets must not install into one environment at once
.PHONY: help demo test test-slow test-gpu lint types format bench notebooks wheel-test clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/.extra-demo ## run examples/demo.py
	$(BIN)/python examples/demo.py

test: $(VENV)/.extra-test ## run the tests and the doctests of the package and README.md
	$(BIN)/pytest -n $(WORKERS) --doctest-modules --doctest-glob=README.md \
	  tests jaxtile README.md

test-slow: $(VENV)/.extra-test ## run the full sweeps
	$(BIN)/pytest -n $(WORKERS) -m slow tests

test-gpu: $(VENV)/.extra-test $(VENV)/.extra-cuda ## run the tests that need a CUDA device
	JAX_PLATFORMS=cuda,cpu $(BIN)/pytest -m gpu tests

lint: $(VENV)/.extra-dev types ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.extra-dev ## check types
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.extra-dev ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.extra-demo ## time reduce and scan on the CPU
	$(BIN)/python benchmarks/cpu_reduce_scan.py

notebooks: $(VENV)/.extra-test $(VENV)/.extra-notebooks ## execute the notebooks
	$(BIN)/pytest -n $(WORKERS) -m notebook tests/test_notebooks.py

# The wheel is built from the checkout and tried where the checkout cannot be seen.
# build/ goes first and last: setuptools would pack whatever an older build left there.
wheel-test: $(VENV)/.created ## build the wheel, try it in an empty environment
	@set -eu; \
	scratch=$$(mktemp -d); trap 'rm -rf "$$scratch" build' EXIT; rm -rf build; \
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir "$$scratch" .; \
	cp tests/wheel_smoke.py "$$scratch"; \
	$(PYTHON) -m venv "$$scratch/venv"; \
	"$$scratch/venv/bin/python" -m pip install --quiet "$$scratch"/*.whl $(JAX_PIN); \
	(cd "$$scratch"; venv/bin/python -I wheel_smoke.py)

clean: ## remove environments, caches and build outputs
	rm -rf .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.extra-%: pyproject.toml $(VENV)/.created
	$(BIN)/python -m pip install --quiet --editable '.[$*]' $(JAX_PIN)
	@touch $@
