# Everything that people and CI do here. Each target can run first and again: what it needs, it makes.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Where it is set, every process would compile all of Tandem, and every run of tests all tests.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
COMMA := ,
HALF_MADE = $(if $(wildcard $(VENV)/pyvenv.cfg),--clear)
SERVING := $(VENV)/.serving
# What serving on one machine needs, and what every start of it imports, which is compiled while installing: to compile
# all files of all packages would take a minute.
SERVING_EXTRAS := router,worker,cluster
SERVING_IMPORTS := fastapi, grpc.aio, redis.asyncio, torch, uvicorn
EXTRAS := $(SERVING_EXTRAS),ray,otel,dev

INTERPRETER_TESTS := tests/unit/kernels/interpreter
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder
SLOWEST := --durations=10 --durations-min=1
UNIT = $(PY) -m pytest -q -m "unit and not slow" $(SIDE_BY_SIDE) $(SLOWEST) --ignore=$(INTERPRETER_TESTS) tests/unit
CHECKOV := checkov==3.3.30
CLIENTS := build/clients
CLIENT_PACKAGES := tests/e2e/clients/requirements.txt
ARGS ?=
BASE ?=
NAME ?=
OUT ?=

.PHONY: help venv serve unit test-changed test-times test check checkov clients format graph proto bench proof train clean

help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create the environment in .venv and install Tandem with everything it needs

# $(call install,EXTRAS,IMPORTS): make the environment if it is not whole, and install while the kernels are compiled
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tandem needs Python 3.11 or newer, this is " \
	  + sys.version.split()[0] + ". Say which one to use: make PYTHON=/path/to/python3")'
	@$(PY) -m pip --version >/dev/null 2>&1 \
	  || { $(PY) -m ensurepip >/dev/null 2>&1 && $(PY) -m pip --version >/dev/null 2>&1; } \
	  || { echo "==> environment: creating $(VENV)"; $(PYTHON) -m venv $(HALF_MADE) $(VENV); }
	@echo "==> environment: installing Tandem with what it needs ($(1)): minutes the first time, most of it torch"
	@PYTHONPATH=core:kernels $(PYTHON) tools/compile_c.py & compiling=$$!; \
	  $(PY) tools/install.py $(1); \
	  wait $$compiling || echo "==> kernels: some are missing; Python and torch take their place, and are slower"; \
	  $(PY) -c 'import $(2)'; touch $(SERVING); echo "==> environment: ready, installed in $$SECONDS s"
endef

$(STAMP): pyproject.toml
	$(call install,$(EXTRAS),$(SERVING_IMPORTS)$(COMMA) transformers)
	@touch $@

$(SERVING): pyproject.toml
	$(call install,$(SERVING_EXTRAS),$(SERVING_IMPORTS))

serve: $(if $(wildcard $(STAMP)),$(STAMP),$(SERVING)) ## start a cluster in the foreground, with a small model that is fetched once; flags in ARGS='--mixed 1 …'
	@$(VENV)/bin/clusterctl up --fetch $(ARGS)

unit: $(STAMP) ## quick unit tests, in parallel: no processes
	@$(UNIT) $(ARGS)

test-changed: $(STAMP) ## tests of what imports the change; BASE=COMMIT to compare with, ARGS for pytest
	@mkdir -p build; $(PY) tools/affected_tests.py --base "$(BASE)" >build/changed.txt; test -s build/changed.txt \
	  || { echo "==> no test imports what changed"; exit 0; }; echo "==> $$(wc -l <build/changed.txt) test files"; \
	  $(PY) -m pytest -q $(SIDE_BY_SIDE) $(SLOWEST) --ignore=$(INTERPRETER_TESTS) $(ARGS) $$(cat build/changed.txt)

test-times: $(STAMP) ## write docs/testing.md and tests/durations.json from the records of the last `make test`
	@$(PY) tools/test_times.py $(ARGS)

test: $(STAMP) ## checks and all tests, side by side; what CI runs. ARGS='--repeat 20 PATH' for some of them
	@$(PY) -m tools.test_run $(ARGS)

check: $(STAMP) ## formatting, lint, types, import layers, generated stubs, folder layout
	@echo "==> ruff format"
	@$(PY) -m ruff format --check --quiet . || { $(PY) -m ruff format --check .; exit 1; }
	@echo "==> ruff check"
	@$(PY) -m ruff check --quiet .
	@echo "==> mypy --strict"
	@$(PY) -m mypy
	@MYPYPATH=tools $(PY) -m mypy tools/train_tiny.py
	@echo "==> import layers"
	@$(VENV)/bin/lint-imports --no-cache --no-logo
	@echo "==> protobuf stubs"
	@$(PY) tools/genproto.py --check
	@echo "==> layout"
	@$(PY) -m pytest -q tests/unit/repo_layout

checkov: $(STAMP) ## hold the Helm chart against checkov, in an environment of its own in build/
	@test -x build/checkov/bin/checkov || { $(PY) -m venv build/checkov \
	  && build/checkov/bin/python -m pip install --quiet --no-input --disable-pip-version-check '$(CHECKOV)'; }
	@$(PY) -m tests.integration.deploy.checkov_program build/checkov/bin/checkov

clients: ## install the clients of tests/e2e/test_clients.py into an environment of their own in build/
	@cmp -s $(CLIENT_PACKAGES) $(CLIENTS)/requirements.txt || { echo "==> clients: installing into $(CLIENTS)" \
	  && $(PYTHON) -m venv --clear $(CLIENTS) && $(CLIENTS)/bin/python -m pip install --quiet --no-input --no-compile --no-deps \
	    --disable-pip-version-check --requirement $(CLIENT_PACKAGES) && cp $(CLIENT_PACKAGES) $(CLIENTS)/requirements.txt; }

format: $(STAMP) ## put all code into its one form
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format .

graph: $(STAMP) ## draw what imports what: OUT=build/graph.svg (or .png, .dot, .mmd); NAME=router: inside one package
	@$(PY) -m tools.import_graph $(NAME) --out "$(OUT)" $(ARGS)

proto: $(STAMP) ## generate protogen/ from proto/
	@$(PY) tools/genproto.py

bench: $(STAMP) ## measure: NAME=… OUT=…; without NAME a list of the benchmarks
	@$(PY) tools/programs.py bench "$(NAME)" --out "$(OUT)" $(ARGS)

proof: $(STAMP) ## run a long, seeded proof: NAME=… OUT=…; without NAME a list of the proofs
	@$(PY) tools/programs.py proof "$(NAME)" --out "$(OUT)" $(ARGS)

train: $(STAMP) ## train the bundled model anew
	@$(PY) tools/train_tiny.py $(ARGS)

clean: ## remove the environment, caches and build output
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
