# Every target first builds .venv if it is missing or out of date. `make` alone lists the targets.
SHELL := bash
PYTHON ?= python3
# Test processes. Each computes with one thread (OMP_NUM_THREADS=1), so this is also the number of cores in use.
JOBS ?= 2
# Seed of the property tests of `make test-slow`.
SEED ?= 0

BIN := .venv/bin
READY := .venv/ready
ORACLE := .venv/oracle
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal

.PHONY: help setup run test test-slow test-oracle lint format bench clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

$(READY): pyproject.toml constraints.txt tools/setup.sh
	@PYTHON='$(PYTHON)' tools/setup.sh

setup: $(READY) ## build .venv: torch, openk3 in place, development tools
	@echo "setup: .venv is up to date"

run: $(READY) ## train the nano model on text that is on this machine, then talk to it
	$(BIN)/openk3 quickstart

test: $(READY) ## run the tests that fit everywhere: no GPU, no peer package, nothing slow
	$(PYTEST) $(ARGS)

test-slow: $(READY) ## run the deep tests and record them in bench/results/slow.json
	@mkdir -p build
	$(PYTEST) -m slow --timeout 7200 --hypothesis-seed $(SEED) --junitxml build/slow.xml $(ARGS); status=$$?; \
	$(BIN)/python tools/record_slow.py build/slow.xml --seed $(SEED) && exit $$status

$(ORACLE): $(READY)
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,oracle]'
	@touch $@

test-oracle: $(ORACLE) ## install the peers into .venv and compare logits and bytes with theirs
	$(PYTEST) -m oracle tests/oracle $(ARGS)

lint: $(READY) ## ruff, mypy --strict, the floors of the design, file sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_file_sizes.py

format: $(READY) ## let ruff format the code and sort its imports
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

bench: $(READY) ## run every script of bench/ that fits this machine; rows go to bench/results/
	@set -e; for script in $$(grep -l __main__ bench/*.py); do echo "== $$script"; $(BIN)/python $$script; done

clean: ## remove build products; keeps .venv, runs/ and cache/
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
