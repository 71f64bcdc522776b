# make demo   install, then train the digits vision-language model over 4 pipeline ranks
# make test   install with test tools, then run all tests but the long ones
# See CONTRIBUTING.md for the others.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo setup test soak lint bench dev clean

demo: setup
	$(BIN)/pipeloom train examples/digits_vlm/train.toml

setup: $(VENV)/.demo-installed

dev: $(VENV)/.dev-installed

test: dev
	$(BIN)/python -m pytest -m "not soak"

soak: dev
	$(BIN)/python -m pytest -m soak

lint: dev
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: dev
	$(BIN)/python -m benchmarks

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[demo]'
	touch $@

$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
