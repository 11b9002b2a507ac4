# One environment in .venv, made again only when pyproject.toml or constraints.txt change.
SHELL := /bin/bash
PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3.12),python3)
VENV := .venv
BIN := $(VENV)/bin
DEV_STAMP := $(VENV)/.installed-dev
STAMP := $(VENV)/.installed
PACKAGES := flows tasks kernels models infra
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup constraints demo reached test check docs up clean

setup: $(DEV_STAMP)  ## the environment with everything

demo: $(STAMP)  ## the whole chain with the nano recipe; run again to continue
	$(BIN)/ostinato demo

reached: $(DEV_STAMP)  ## which product lines the documented commands run (an hour or more)
	$(BIN)/python -m tests.reached

# Files of tests are shared, in their order, among this many processes; 0: all in this one, printed as they run. Three
# keep two cores busy: each waits two fifths of its time.
# One that crashes ends the run: with another in its place pytest-xdist 3.8 waits for ever for the rest of its files.
PYTEST_WORKERS ?= 3

test: $(DEV_STAMP)  ## the default test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) --max-worker-restart=0 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(DEV_STAMP)  ## format, lint, types, layers, workflow file, what a language server finds
	$(BIN)/ruff format --check *.py $(PACKAGES) tests
	$(BIN)/ruff check *.py $(PACKAGES) tests
	mkdir -p $(VENV)/src && ln -sfn $(CURDIR) $(VENV)/src/ostinato # by this name, whatever the checkout is called
	$(BIN)/pyright -p $(VENV)/src/ostinato
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml examples/*.yml
	$(BIN)/python -m pytest -q tests/architecture/test_references.py -m editor

docs: $(DEV_STAMP)  ## the generated pages of docs/
	$(BIN)/python docs/recipe_reference.py > docs/recipe-reference.md
	$(BIN)/python docs/gateway_reference.py > docs/gateway-api.md

# One file for Python 3.11 and 3.12, from the plain index. Versions that stand in it stay unless a name is
# given: make constraints UPGRADE="--upgrade-package prefect"
# constraints-sha256.txt: the same with the checksums of all files, for who wants no other bytes.
constraints: .uv/bin/uv  ## resolve constraints.txt again after pyproject.toml has changed
	.uv/bin/uv pip compile pyproject.toml --universal --python-version 3.11 --extra dev --extra postgres --extra cluster \
	  --no-annotate --custom-compile-command 'make constraints' -o constraints.txt $(UPGRADE)
	.uv/bin/uv pip compile constraints.txt --universal --python-version 3.11 --no-deps --generate-hashes \
	  --no-annotate --custom-compile-command 'make constraints' -o constraints-sha256.txt

up: $(STAMP)  ## server, worker, deployments and gateway on this machine
	$(BIN)/ostinato up

clean:  ## remove the environment, caches and everything the project computed
	rm -rf $(VENV) .uv .ostinato build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; wanted Python 3.11 or 3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

.uv/bin/uv:
	$(PYTHON) -m venv .uv && .uv/bin/pip install -q uv

# uv takes half of pip's processor time and reads none of pip's settings. Where pip is told of another index, or uv
# fails, pip installs.
install = { ! $(BIN)/python -m pip config list | grep -qE '(^|[.:])(index-url|no-index)=' \
  && .uv/bin/uv pip install --python $(BIN)/python --compile-bytecode -c constraints.txt $(1); } \
  || $(BIN)/python -m pip install -c constraints.txt $(1)
EVERYTHING := -e '.[dev,postgres]'

# an empty database, which else each first start of a server takes six seconds to make
EMPTY_DATABASE := DO_NOT_TRACK=1 PREFECT_HOME=$(VENV)/share/prefect $(BIN)/prefect server database upgrade -y

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python .uv/bin/uv
	$(call install,$(EVERYTHING))
	$(EMPTY_DATABASE)
	touch $(STAMP) $(DEV_STAMP)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python .uv/bin/uv
	$(call install,-e '.[train]')
	$(EMPTY_DATABASE)
	touch $(STAMP)
