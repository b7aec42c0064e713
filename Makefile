# make demo   plain vLLM and subspec side by side, on a small real model
# make test   the test suite
# make test-gpu   what of it needs a GPU
# All set up .venv on the first run (Python 3.11 or newer, gcc; about 2 GB).

PYTHON ?= python3
GPU_JOBS ?= 12  # engines on the GPU at a time, a core and 2 to 4 GB of its memory each
VENV := .venv
JOBS ?= 2  # test files at a time; an engine each, of one thread and a few GB
BIN := $(VENV)/bin

.PHONY: demo test test-gpu setup clean

demo: setup
	$(BIN)/vllm-subspec demo

test: setup
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15 $(PYTEST_ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -q -n $(GPU_JOBS) --maxschedchunk=1 --durations=15 -m "(gpu or kernels) and not alone" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -q -m "gpu and alone" --durations=5 $(PYTEST_ARGS)

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml setup.sh
	PYTHON=$(PYTHON) VENV=$(VENV) sh setup.sh
	touch $@

clean:
	rm -rf $(VENV)
