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

# A run starts hundreds of processes. Without files of bytecode, each would compile hethub anew, and each of pytest's
# workers all tests.
unexport PYTHONDONTWRITEBYTECODE

# Tests wait as much as they compute, for processes and for faults to show, so four run at a time on two cores.
PYTEST := $(BIN)/python -m pytest -n 4 --dist worksteal --durations=25

.PHONY: demo test test-slow check evidence docs clean

demo: $(INSTALLED)
	$(MPIRUN) -n 4 $(BIN)/hethub train configs/jobs/laptop-mixed.yaml

test: $(INSTALLED)
	$(PYTEST) -m "not slow"

# What takes minutes: torch's own DistributedTest under three layouts of islands, Inductor, long training.
test-slow: $(INSTALLED)
	$(PYTEST) -m slow

# What takes too long for every change. Each result is written to docs/evidence, to be committed with the change that
# it proves: make evidence [EVIDENCE="reference planner-exhaustive"]
EVIDENCE ?=
evidence: $(INSTALLED)
	$(BIN)/python -P tests/evidence.py $(EVIDENCE)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The user's guide as a site, in build/site; any warning is an error.
docs: $(INSTALLED)
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	$(BIN)/python -m hethub.commands.reference docs/reference.md
	$(BIN)/mkdocs build --strict

$(INSTALLED): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[train,test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
