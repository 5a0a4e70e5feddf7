# make setup     a virtual environment with landfall and the tools to develop it
# make test      everything that is quick: style, types, import rules, tests
# make ci        what has to pass before a change is merged

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup test lint types imports slow demo ci clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 12) or \
		sys.exit("landfall needs Python 3.10 to 3.12, $(PYTHON) is %d.%d: make PYTHON=python3.11" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

test: lint types imports
	$(BIN)/pytest -n 2

slow: setup
	$(BIN)/pytest -m slow -n 2

demo: setup
	$(BIN)/landfall demo

ci:
	$(MAKE) test
	$(MAKE) slow
	$(MAKE) demo

clean:
	rm -rf build dist demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +
