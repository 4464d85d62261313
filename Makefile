# outrider: `make demo` and `make test` are all a fresh machine needs; both make the environment first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
STAMP := $(VENV)/.installed
PACKAGES := engine rpc cluster router deployments bench
PYTEST_ARGS ?=
say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

# Checks and demo share two cores with Ray: one thread per model is also what reproducible mode is measured with.
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help setup demo test format lint types imports stubs pytest proto bench soak lock clean

help:  ## show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(STAMP)  ## make .venv with exactly the locked packages

$(STAMP): pyproject.toml requirements.lock
	$(call say,Checking for Python 3.11 or 3.12: $(PYTHON))
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	  || { echo "outrider needs Python 3.11 or 3.12; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(call say,Making $(VENV))
	@# Debian ships ensurepip apart (python3-venv); without it the system's pip fills the environment from outside.
	@"$(PYTHON)" -m venv $(VENV) 2>/dev/null || { "$(PYTHON)" -m venv --clear --without-pip $(VENV) \
	  && "$(PYTHON)" -m pip --python $(BIN)/python install --quiet pip; }
	$(call say,Installing the locked packages: about 2 GB on disk)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -r requirements.lock
	$(call say,Installing outrider itself)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup  ## start the whole system, answer four prompts, stop it again
	@$(BIN)/outrider demo

test: setup format lint types imports stubs pytest  ## every check

format: setup  ## is the code formatted?
	$(call say,ruff format)
	@$(BIN)/ruff format --check .

lint: setup
	$(call say,ruff check)
	@$(BIN)/ruff check .

types: setup
	$(call say,mypy --strict)
	@$(BIN)/mypy

imports: setup
	$(call say,import-linter)
	@$(BIN)/lint-imports --no-logo

stubs: setup  ## are the committed gRPC stubs those of proto/?
	$(call say,stub drift)
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call protoc,$$fresh) && touch "$$fresh/rpc/pb/__init__.py" && \
	diff -r --exclude=__pycache__ "$$fresh/rpc/pb" rpc/pb || { echo "stubs differ from proto/: run make proto" >&2; exit 1; }

pytest: setup  ## the tests: those of one process on all cores, then those that start a Ray, one by one
	$(call say,pytest: one process each)
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not serve" $(PYTEST_ARGS)
	$(call say,pytest: local Ray)
	@$(BIN)/python -m pytest -m serve $(PYTEST_ARGS)

soak: setup  ## 20 minutes of load and faults, then the books
	$(call say,soak)
	@SOAK_SECONDS=1200 $(BIN)/python -m pytest -s tests/chaos/test_soak.py

protoc = $(BIN)/python -m grpc_tools.protoc -Irpc/pb=proto --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) proto/*.proto

proto: setup  ## regenerate the gRPC stubs
	$(call say,protoc)
	@$(call protoc,.)

bench: setup  ## speculation against plain decoding on the bundled prompts
	@$(BIN)/outrider bench --prompts bench/prompts.jsonl

lock: ## resolve pyproject.toml anew and pin what came out
	$(call say,Resolving)
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; "$(PYTHON)" -m venv "$$fresh"; \
	"$$fresh/bin/pip" install --quiet --upgrade pip setuptools; "$$fresh/bin/pip" install '.[dev]'; \
	{ sed -n '/^#/p' requirements.lock; \
	  "$$fresh/bin/pip" freeze --all | grep -viE '^(pip|outrider)[ =@]' | sed -E 's/\+(cpu|cu[0-9]+)$$//'; } > requirements.new; \
	mv requirements.new requirements.lock

clean:  ## remove what make made, models excepted
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
