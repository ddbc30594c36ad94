# make demo   train on MovieLens-100K with eager, Inductor and gem, and compare
# make test   lint, types, documentation and every test
# make docs   the documentation, in build/site
# make page   the report page's script and styles, from page/; needs node, which nothing else does
# Each makes its own .venv the first time and leaves it alone afterwards.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: demo test lint types docs unit page install clean

demo: $(STAMP)
	$(BIN)/python examples/movielens/train.py $(ARGS)

test: lint types docs unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: $(STAMP)
	$(BIN)/pytest --numprocesses 2 --dist worksteal $(ARGS)

page:
	cd page && npm ci --no-audit --no-fund && npm run build

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
