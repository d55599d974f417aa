VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: check demo docs lint test

TESTS := $(BIN)/python -m pytest -n 2 --dist worksteal

# PETRA over four processes: loss and accuracy in runs/*/curves.png
demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 -m launch.train experiment=demo

# everything
test: lint
	$(TESTS)

# lint, types, and the tests that need one process
check: lint
	$(TESTS) -m "not processes"

# the documentation site, in build/site
docs: $(VENV)/installed
	$(BIN)/pip install -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -e '.[dev]'
	-$(BIN)/pip install -e '.[manifests]' # their tests skip what can't be had
	touch $@
