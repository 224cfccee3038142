# Each target does the whole set-up on a fresh machine, once, and then runs.
# A CPU build of torch is enough and much smaller than the default one on Linux:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

VENV ?= .venv
TORCH ?= torch==2.13.0
READY := $(VENV)/.ready
BIN := $(VENV)/bin

.PHONY: demo test check lab setup clean-venv

demo: $(READY)
	$(BIN)/refengine demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

lab: $(READY)
	@first=$$(ls chapters/*.ipynb 2>/dev/null | head -n 1); \
	test -n "$$first" || { echo "There is no chapter yet; README.md says what exists."; exit 1; }; \
	$(BIN)/jupyter lab "$$first"

setup: $(READY)

# torch first and alone: pulled in by another package it would be a different, larger build.
$(READY): pyproject.toml
	@echo "Setting up $(VENV); this happens once and takes a few minutes."
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e '.[lab,dev]'
	@touch $@

clean-venv:
	rm -rf $(VENV)
