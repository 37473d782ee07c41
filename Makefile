# make demo and make test need nothing installed beforehand but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := runs/demo

export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test test-all lint house gate bench fuzz docs clean

help:          ## list what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: $(VENV)/.installed  ## make .venv with RoutePack and its tools

# torch is installed first and pinned: a later package's open range would fetch a larger build.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "pip>=25.1"
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[torchtitan,lightning,report,transformers]' --group dev
	touch $@

demo: install  ## train a tiny MoE with GRPO on 4 ranks, then plan from its trace
	$(BIN)/routepack train configs/tiny_rl.yaml out=$(DEMO)

test: install lint  ## lint, types and the tests
	$(BIN)/pytest

test-all: install lint  ## the slow tests too
	$(BIN)/pytest -m ''

lint: install  ## what .pre-commit-config.yaml runs before a commit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

house: install  ## draw docs/design/house.md, the map of src/routepack, anew
	$(BIN)/python docs/house.py

gate: install  ## compile every kernel for every architecture, on two Triton versions, and judge the machine code
	$(BIN)/python benchmarks/gate.py

bench: install  ## the collector's and the planner's figures
	$(BIN)/python benchmarks/collector.py
	$(BIN)/python benchmarks/planner.py

fuzz: install  ## a million inputs for every importer; takes hours
	$(BIN)/pip install --quiet --group fuzz
	for form in $$($(BIN)/python tests/fuzz/fuzz_importers.py --list 2>/dev/null); do \
		$(BIN)/python tests/fuzz/fuzz_importers.py $$form --blind --runs 1000000 && \
		$(BIN)/python tests/fuzz/fuzz_importers.py $$form --seconds 600 || exit 1; done

docs: house  ## build the documentation into site/
	$(BIN)/pip install --quiet -c constraints.txt --group docs
	$(BIN)/mkdocs build --strict

clean:         ## remove what was built, not .venv
	rm -rf build dist site runs .pytest_cache .ruff_cache .hypothesis .grimp_cache .import_linter_cache
