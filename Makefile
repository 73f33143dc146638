# Everything a clone needs is made here: `make test` and `make demo` start from nothing but Python 3.11 with venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install test lint format generate demo clean

help:
	@echo "make demo      three answers from a real model, with and without speculation"
	@echo "make test      linters, type checks and all tests"
	@echo "make lint      the checks without the tests"
	@echo "make format    format Python and protos"
	@echo "make generate  graftree/v1 from protos/"
	@echo "make clean     remove the virtual environment and caches"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into .venv; this takes some minutes the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/arid . --color never

test: lint
	$(BIN)/python -m pytest

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write protos

generate: $(INSTALLED)
	$(BIN)/python protos/generate.py

demo: $(INSTALLED)
	$(BIN)/python -m bench.demo

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
