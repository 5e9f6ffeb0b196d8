# One command each. `make` alone lists them. Needs Python >= 3.11 and make; everything else is installed into .venv, or started, or named.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
EXTRAS := redis,rabbitmq,postgres,mysql,flower,django,flask,dev

# minutes of `make soak`; 30 and more are judged
MINUTES ?= 30
# options handed to pytest by test, soak, chaos and test-docker
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint soak chaos bench test-docker clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

setup: $(STAMP) ## create .venv with all extras at the tested versions

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Millstream needs Python >= 3.11, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(PY) && $(PY) -m pip --version >/dev/null 2>&1 || $(MAKE) --no-print-directory .make-venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# Debian ships Python without ensurepip; its package python3-venv holds it.
.PHONY: .make-venv
.make-venv:
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) && exit 0; rm -rf $(VENV); \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "Installing python3-venv ..."; \
	  apt-get update -q >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3-venv >/dev/null \
	    && $(PYTHON) -m venv $(VENV) && exit 0; rm -rf $(VENV); \
	fi; \
	echo "$(PYTHON) cannot make a virtual environment. On Debian or Ubuntu: sudo apt-get install python3-venv; then run make setup again."; exit 1

demo: $(STAMP) ## flights of January 2013 through a stream job that is killed and recovers
	@$(PY) -m examples.flights $(ARGS)

lint: $(STAMP) ## ruff, formatting, types, import arrows
	@$(PY) -m tests.support.tiers lint

test: $(STAMP) ## lint and all tiers; starts or installs the servers it needs
	@$(PY) -m tests.support.services ensure
	@$(PY) -m tests.support.tiers lint architecture unit contract migration simulation integration acceptance -- $(ARGS); code=$$?; \
	  $(PY) -m tests.support.services stop; exit $$code

soak: $(STAMP) ## one job under load and faults for MINUTES (30)
	@MILLSTREAM_SOAK_MINUTES=$(MINUTES) $(PY) -m tests.support.tiers soak -- $(ARGS)

chaos: $(STAMP) ## servers, workers and networks broken under running jobs
	@$(PY) -m tests.support.tiers chaos -- $(ARGS)

bench: $(STAMP) ## throughput and latency on this machine
	@$(PY) -m benchmarks $(ARGS)

test-docker: $(STAMP) ## the container scenarios (needs Docker)
	@docker info >/dev/null 2>&1 || { echo "No Docker daemon answers: make test-docker needs one."; exit 1; }
	@MILLSTREAM_TEST_DOCKER=1 $(PY) -m tests.support.tiers docker -- $(ARGS)

clean: ## remove caches, build results and what tests left in .data; keeps .venv
	@$(PY) -m tests.support.services stop || true
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .data build dist
