# What a user types. `make replay` needs Python 3.11 or newer and nothing else; everything lives in .venv.

PYTHON ?= python3
# A CPU build of torch is enough for every test. On a machine with a GPU: make test TORCH="torch>=2.9".
TORCH ?= torch==2.13.0
TRACE ?= examples/trace.csv
OUT ?= runs/replay
MODEL ?= llama-3.1-8b
GPU ?= h100
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin

.PHONY: help replay test lint bench clean

help:
	@echo "make replay [TRACE=my.csv] [MODEL=...] [GPU=...] [OUT=runs/replay]   replay a trace under every policy"
	@echo "make test                                                        install what the tests need, run them all"
	@echo "make lint                                                        ruff, mypy"
	@echo "make bench                                                       the simulator's speed beside a bare loop"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, found " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/core: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[executor,report,dev]'
	@touch $@ $(VENV)/core

replay: $(VENV)/core
	$(BIN)/python -m simulator compare $(TRACE) --model $(MODEL) --gpu $(GPU) --out $(OUT) --figures

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

bench: $(VENV)/core
	$(BIN)/python benchmarks/simulator.py

clean:
	rm -rf $(VENV) runs build *.egg-info
