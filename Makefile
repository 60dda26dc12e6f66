PYTHON ?= python3
# Extra flags for pip, such as an index with CPU builds of torch (see README).
PIP_FLAGS ?=
BUF ?= npx --yes @bufbuild/buf@1.75.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check proto bench clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --only-binary=:all: $(PIP_FLAGS) \
		-c constraints.txt -e '.[worker,test]'
	@touch $@

demo: $(INSTALLED) ## complete a prompt through three services and show the latency account
	$(BIN)/baton demo

test: $(INSTALLED) ## all tests that need no accelerator
	$(BIN)/python -m pytest

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
