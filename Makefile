# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install into it; nothing else is touched.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.19.0
INPUTS := pyproject.toml constraints.txt hatch_build.py src/kvslim/kernels/cpu/build.py $(wildcard src/kvslim/native/*)

.PHONY: demo test test-oldest lint clean

demo: $(VENV)/.installed-demo
	$(PY) -m kvslim demo

test: lint
	$(PY) -m pytest

# What touches transformers, on the oldest version that is supported. Everything else comes from .venv.
test-oldest: $(OLDEST)/.installed-$(OLDEST_TRANSFORMERS)
	$(OLDEST)/bin/python -m pytest tests/test_layer_kinds.py tests/test_operations.py tests/test_adapter.py \
		-k "not test_packed_generation and not nan_is_refused"

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

# The .pth line links the packages of .venv behind its own, editable installs included: nothing is installed twice.
$(OLDEST)/.installed-$(OLDEST_TRANSFORMERS): $(VENV)/.installed-test
	$(PYTHON) -m venv $(OLDEST)
	$(PY) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> "$$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/newest.pth"
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet transformers==$(OLDEST_TRANSFORMERS)
	@touch $@

# torch comes first and alone, so that pip may take a CPU build that lies on disk or in the index it is set up with.
$(VENV)/.installed-torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch (the first time this takes some minutes)"
	$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)"
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache build dist
