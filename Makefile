VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: demo test

# PETRA over four processes: loss and accuracy in runs/*/curves.png
demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 -m launch.train experiment=demo

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -e '.[dev]'
	-$(BIN)/pip install -e '.[manifests]' # their tests skip what can't be had
	touch $@
