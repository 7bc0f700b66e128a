# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install into it; nothing else is touched.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt hatch_build.py src/kvslim/kernels/cpu/build.py $(wildcard src/kvslim/native/*)

.PHONY: demo test lint clean

demo: $(VENV)/.installed-demo
	$(PY) -m kvslim demo

test: lint
	$(PY) -m pytest

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Stamps: an install is repeated only when what it was made from has changed.
$(VENV)/.installed-demo: $(VENV)/.installed-torch $(INPUTS)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[gguf]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-torch $(INPUTS)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test,dev,gguf]'
	@touch $@

# torch comes first and alone, so that pip may take a CPU build that lies on disk or in the index it is set up with.
$(VENV)/.installed-torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch (the first time this takes some minutes)"
	$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
