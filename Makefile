# Two commands set everything up on a fresh machine with Python ≥ 3.11, a compiler and make: `make demo`, `make test`.

PYTHON ?= python3
# On Linux, PyPI's torch is the CUDA build (some GB). For the small CPU build: make demo PIP_ARGS='--extra-index-url URL'
# with the URL of PyTorch's CPU wheels (README, Installing).
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Four ranks on however many cores there are; as root, Open MPI asks to be told that it is meant.
MPIRUN := OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	$(BIN)/mpirun --oversubscribe --bind-to none --continuous

.PHONY: demo test test-all test-communicator check clean

demo: $(INSTALLED)
	$(MPIRUN) -n 4 $(BIN)/hethub train configs/jobs/laptop-mixed.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest

# torch's own DistributedTest under three layouts of islands, and Inductor beside what `make test` runs of it.
test-communicator: $(INSTALLED)
	$(BIN)/python -m pytest tests/communicator -m "slow or not slow" -s

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[train,test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
