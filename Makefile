# make demo   install, then train the digits vision-language model over 4 pipeline ranks
# make test   install with test tools, then run the tests of every change
# See CONTRIBUTING.md for the others.

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
# Without byte code: of thousands of modules, hundreds are imported, and those are compiled when they are
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint $(CONSTRAINTS)
# An index or a folder with the CPU build of torch: the public index has the CUDA build, about 3 GB
TORCH_INDEX ?=
ifneq ($(TORCH_INDEX),)
PIP_INSTALL += $(if $(wildcard $(TORCH_INDEX)),--find-links,--extra-index-url) $(TORCH_INDEX)
endif

# Tests start many processes that import the same modules
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo setup test test-all test-torchtitan test-megatron test-models test-lowest soak mutants lint docs bench gpu dev clean

demo: setup
	$(BIN)/pipeloom train examples/digits_vlm/train.toml

setup: $(VENV)/.demo-installed

dev: $(VENV)/.dev-installed

# Workers of the tests; one of them runs all tests that start ranks
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS)

test: dev
	$(PYTEST) -m "not full and not soak"

test-all: dev
	$(PYTEST) --cold --hypothesis-profile=many -m "not soak"

# In an environment of their own: torchtitan asks for an older datasets than the other tests
test-torchtitan:
	$(MAKE) torchtitan-tests VENV=.venv-torchtitan CONSTRAINTS=constraints-torchtitan.txt

.PHONY: torchtitan-tests
torchtitan-tests: $(VENV)/.torchtitan-installed
	$(BIN)/python -m pytest tests/integrations/test_torchtitan.py

# With the Megatron Core that is installed, and with a newer one that is unpacked: it asks for a newer Python
NEWER_MEGATRON := .megatron-0.19.2
MEGATRON_TESTS := $(addprefix tests/integrations/megatron/,test_training.py test_strategies.py test_vision_language.py)
test-megatron: dev $(NEWER_MEGATRON)/megatron
	$(BIN)/python -m pytest $(MEGATRON_TESTS)
	PYTHONPATH=$(NEWER_MEGATRON) $(BIN)/python -m pytest $(MEGATRON_TESTS)

$(NEWER_MEGATRON)/megatron: | $(VENV)/.dev-installed
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
	  --dest $(NEWER_MEGATRON) megatron-core==0.19.2
	$(BIN)/python -m pip install --quiet --no-deps --target $(NEWER_MEGATRON) triton einops
	$(BIN)/python -m zipfile -e $(NEWER_MEGATRON)/megatron_core-*.whl $(NEWER_MEGATRON)

# One step on two ranks of every image-text and multimodal class of transformers, with a table of the results
test-models: dev
	$(BIN)/python -m tests.integrations.transformers.every_model --out docs/notes/models.md

# Tests of the packages that import torch, with the lowest version of torch that pyproject.toml claims.
# Its checkpoints warn of storages; PyTorch's own code does that.
test-lowest:
	$(MAKE) torch-tests VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt

TORCH_TESTS := tests/runtime tests/training tests/integrations tests/examples tests/test_simulated.py
.PHONY: torch-tests
torch-tests: dev
	$(PYTEST) -m "not full and not soak" -W "ignore:TypedStorage is deprecated" $(TORCH_TESTS)

soak: dev
	$(PYTEST) --cold -m soak

# Faults in the code that orders work on a device, and how many of them the simulated accelerator finds
mutants: dev
	$(BIN)/python scripts/mutants.py

lint: dev
	$(BIN)/ruff check conftest.py src lab tests examples benchmarks scripts
	$(BIN)/ruff format --check conftest.py src lab tests examples benchmarks scripts
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_house.py
	$(BIN)/python scripts/reachable.py

bench: dev
	$(BIN)/python -m benchmarks

# All that waits for GPUs, or PART=NAME of it; DRY=--dry rehearses on the CPU, RESUME=--resume goes on. Installs nothing:
# GPU_PYTHON has torch
GPU_PYTHON ?= $(BIN)/python
gpu:
	PYTHONPATH=src:lab/src:$$PYTHONPATH $(GPU_PYTHON) -m benchmarks.on_gpu $(if $(PART),--part $(PART)) $(DRY) $(RESUME) $(if $(OUT),--out $(OUT))

# The site, in site/; made from docs/ and docstrings without a network
docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/.dev-installed: pyproject.toml lab/pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[dev]' --editable './lab[exact]'
	touch $@

$(VENV)/.torchtitan-installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[torchtitan]' hypothesis pytest pytest-xdist
	touch $@

$(VENV)/.docs-installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest .venv-torchtitan runs build site src/*.egg-info lab/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
