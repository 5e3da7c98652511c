# `make run` and `make test` set everything up on a machine with nothing but Python and pip.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: run test lint types unit docs format clean setup

run: setup            ## compare DDPNOpt with SGD, RMSprop and Adam on DIGITS: a table and a picture
	$(BIN)/ddpnopt compare digits --out results/compare

test: setup lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# One torch thread per worker: two workers on two cores are faster than two threads on small tensors.
unit: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

docs: setup           ## the site, in site/; the tests build it as well
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
