# `make demo` trains a network on real digits, `make test` checks everything; both set up .venv the first time.
PYTHON ?= python3
V = .venv
export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: demo test lint bench test-interop floors clean

demo: $(V)/.ok
	$(V)/bin/python nbs/demo.py

test: lint
	$(V)/bin/python -m pytest -q

lint: $(V)/.ok
	$(V)/bin/ruff check .
	$(V)/bin/pyright --pythonpath $(V)/bin/python

bench: $(V)/.ok
	$(V)/bin/python -m tests.bench.run

# The same tests with the libraries that learner works with, in an environment of their own.
test-interop: $(V)/.interop
	$(V)-interop/bin/python -m pytest -q tests/interop

# The oldest versions that settings.ini allows, in an environment of their own: run by hand when a bound changes.
floors:
	$(PYTHON) -m venv $(V)-floors
	$(V)-floors/bin/pip install -q -c constraints-floors.txt -e '.[dev]'
	$(V)-floors/bin/python -m pytest -q

$(V)/.ok: settings.ini setup.py pyproject.toml constraints.txt
	@echo "Setting up $(V); this takes a minute or two, once."
	test -x $(V)/bin/python || $(PYTHON) -m venv $(V)
	$(V)/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(V)/.interop: $(V)/.ok
	test -x $(V)-interop/bin/python || $(PYTHON) -m venv $(V)-interop
	$(V)-interop/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,interop]'
	touch $@

clean:
	rm -rf $(V) $(V)-interop $(V)-floors runs build dist *.egg-info
