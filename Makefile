# Every target creates the virtual environment that it needs. PYTHON is its interpreter, VENV its
# folder:
#   make test PYTHON=python3.12 VENV=.venv312
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DOCS_STAMP := $(VENV)/.stamp-docs

# JAX runs on the CPU, unless another platform is named: JAX_PLATFORMS=cuda make demo
# With no platform named, the compilers for absent GPUs and TPUs log that their device is missing.
export JAX_PLATFORMS ?= cpu

# Without this, tests compile for the CPU without optimization; see conftest.py.
OPTIMIZED := XLA_FLAGS=--xla_backend_optimization_level=3

.PHONY: help venv demo test test-aot zoo golden nightly bench-memory tables lint format docs constraints clean

help:
	@echo "make demo | test | test-aot | zoo | golden | nightly | bench-memory | tables | lint | format | docs | constraints | venv | clean"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev,gpu-aot,tpu-aot]"
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e ".[docs]"
	touch $@

demo: $(STAMP)
	$(BIN)/python -m experiments.demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=20

# Memory and traffic of whole steps, compiled for absent GPUs and TPUs.
test-aot: $(STAMP)
	$(OPTIMIZED) $(BIN)/python -m pytest -n 2 -m aot -s

# Networks of other packages, in an environment of their own. It takes about a quarter of an hour, in
# one process: two would compile each network twice.
ZOO_VENV ?= .venv-zoo

$(ZOO_VENV)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ZOO_VENV)
	$(ZOO_VENV)/bin/python -m pip install -c constraints.txt -e ".[dev,zoo]"
	touch $@

zoo: $(ZOO_VENV)/.stamp
	$(OPTIMIZED) $(ZOO_VENV)/bin/python -m pytest -m zoo tests/zoo -s

# Refreshes the figures with which `make test-aot` compares.
golden: $(STAMP)
	$(BIN)/python -m experiments.bench.golden --out experiments/results/golden-h100

# The newest JAX and all other dependencies, without the pinned versions, also with JAX's next form of
# jax.checkpoint; the lowest versions that pyproject.toml names; then what `make test` leaves out, kills
# of a training run, and random programs.
NIGHTLY_VENV ?= .venv-nightly
LOWEST_VENV ?= .venv-lowest

nightly: $(STAMP)
	$(PYTHON) -m venv --clear $(NIGHTLY_VENV)
	$(NIGHTLY_VENV)/bin/python -m pip install -e ".[dev]"
	$(OPTIMIZED) $(NIGHTLY_VENV)/bin/python -m pytest -n 2 -m "not zoo and not aot"
	JAX_REMAT3=1 $(OPTIMIZED) $(NIGHTLY_VENV)/bin/python -m pytest -n 2 tests/policies tests/sharding tests/transform
	$(PYTHON) -m venv --clear $(LOWEST_VENV)
	$(BIN)/uv pip install --python $(LOWEST_VENV) --resolution lowest-direct -e ".[dev]"
	$(OPTIMIZED) $(LOWEST_VENV)/bin/python -m pytest -n 2 -m "not zoo and not aot"
	$(MAKE) test-aot zoo docs
	$(BIN)/python -m experiments.checks.faults --out build/faults
	$(BIN)/python -m experiments.checks.fuzz --programs 2000 --seed 0 --out build/fuzz

# Compiles ahead of time and runs nothing. It takes about an hour and a half on two cores.
bench-memory: $(STAMP)
	for target in h100 v5e; do \
	  $(BIN)/python -m experiments.bench.gates --target $$target \
	    --out experiments/results/gates-$$target || exit 1; \
	  $(BIN)/python -m experiments.bench.stage --target $$target \
	    --out experiments/results/stage-$$target || exit 1; \
	done
	for target in h100 a100 v5e; do \
	  $(BIN)/python -m experiments.bench.memory --target $$target \
	    --out experiments/results/resnet50-$$target || exit 1; \
	done

# Writes the tables of README.md and docs/ from the records of experiments/results.
tables: $(STAMP)
	$(BIN)/python -m experiments.tables

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Executes the tutorials, too, in about five minutes; EXECUTE_TUTORIALS=false leaves that out.
docs: $(DOCS_STAMP)
	$(BIN)/mkdocs build --strict

# Pins the newest compatible versions, for each Python version that pyproject.toml names. Networks of
# the extra zoo may be old and do not hold the others back.
constraints: $(STAMP)
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra docs --extra gpu-aot \
	  --extra tpu-aot --extra machine-code --universal --python-version 3.11 --upgrade \
	  --no-annotate --custom-compile-command "make constraints" --output-file constraints.txt

clean:
	rm -rf $(VENV) $(ZOO_VENV) $(NIGHTLY_VENV) $(LOWEST_VENV) site .cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
