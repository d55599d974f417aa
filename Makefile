VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

CUDA_VENV ?= .venv-cuda
CUDA_TORCH := torch==2.14.1

.PHONY: check demo dist docs lint stress test test-cuda-build

TESTS := $(BIN)/python -m pytest -n 2 --dist worksteal
# they wait for delays and timeouts much of the time
EMULATED_TESTS := $(BIN)/python -m pytest -n 4 --dist worksteal -m "not stress" tests/emulated

# PETRA over four processes: loss and accuracy in runs/*/report.html
demo: $(VENV)/package
	$(BIN)/petra train --nproc 4 experiment=demo

# everything; the extension of the emulated tests is compiled beside the other tests
test: lint
	$(BIN)/python -m tests.emulated.build & $(TESTS) -m "not emulated"; status=$$?; wait; exit $$status
	$(EMULATED_TESTS)

# lint, types, and the fast tests: those of the core that need one process
check: lint
	$(TESTS) -m "not processes" tests/test_structure.py tests/engine tests/plan tests/reversible tests/transport

# soak, kills, fuzz, two hosts, Slurm, the whole emulated matrix: hours. `python -m stress --only NAME` runs parts
stress: $(VENV)/installed
	$(BIN)/python -m stress

# with the CUDA build of torch, which needs 6 GB of disk and no GPU: private functions of torch, Triton kernels compiled to machine
# code, doctor, fake tensors, and a short run
test-cuda-build: $(CUDA_VENV)/installed
	$(CUDA_VENV)/bin/python -m pytest -n 2 --dist worksteal tests/test_torch_private.py tests/inplace_abn/test_abn_kernels.py \
		tests/launch/test_doctor.py tests/cost_model/test_memory.py tests/engine/test_stage.py \
		tests/engine/test_update.py tests/engine/test_staging.py tests/test_distributed.py
	$(CUDA_VENV)/bin/petra doctor trainer.device=cpu
	OMP_NUM_THREADS=1 $(CUDA_VENV)/bin/petra train --nproc 2 data=synthetic data.images=64 data.batch_size=8 model.width=0.0625 \
		trainer.epochs=1 trainer.device=cpu run_dir=$(CUDA_VENV)/run

# the documentation site, in build/site
docs: $(VENV)/installed
	$(BIN)/pip install -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# the package of a release, in dist/
dist: $(VENV)/installed
	$(BIN)/pip install -c constraints.txt -e '.[release]'
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	! test -x $(BIN)/hadolint || $(BIN)/hadolint docker/Dockerfile
	! test -x $(BIN)/shellcheck || $(BIN)/shellcheck docker/two_nodes.sh launch/templates/slurm.sbatch

$(CUDA_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	sed 's/^torch==.*/$(CUDA_TORCH)/' constraints.txt > $(CUDA_VENV)/constraints.txt
	$(CUDA_VENV)/bin/pip install -c $(CUDA_VENV)/constraints.txt -e '.[dev]' triton
	touch $@

# the package alone, then the tools of development
$(VENV)/package: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e .
	touch $@

$(VENV)/installed: $(VENV)/package
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	-$(BIN)/pip install -c constraints.txt -e '.[manifests]' # their tests skip what can't be had
	touch $@
