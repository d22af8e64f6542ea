# `make demo` trains a network on real digits, `make test` checks everything; both set up .venv the first time.
PYTHON ?= python3
MIN_PYTHON := $(shell sed -n 's/^min_python *= *//p' settings.ini)
export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: demo test lint bench torture test-interop test-mmengine floors clean

demo: .venv/.ok
	.venv/bin/python nbs/demo.py

test: lint
	.venv/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

lint: .venv/.ok
	.venv/bin/ruff check .
	.venv/bin/pyright --pythonpath .venv/bin/python

bench: .venv/.ok
	.venv/bin/python -m tests.bench.run

# Fits that are killed at random moments, by hand: the full matrix of what tests/test_kill.py tries.
torture: .venv/.ok
	.venv/bin/python -m tests.torture.run

# With the libraries that learner works with.
test-interop: .venv-interop/.ok
	.venv-interop/bin/python -m pytest -q tests/interop

# With MMEngine's own hooks and its Runner, which are heavy.
test-mmengine: .venv-mmengine/.ok
	.venv-mmengine/bin/python -m pytest -q tests/interop/test_mmengine.py

# With the oldest versions that settings.ini allows: by hand, when a bound changes.
floors: .venv-floors/.ok
	.venv-floors/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

clean:
	rm -rf .venv .venv-interop .venv-mmengine .venv-floors runs build dist *.egg-info

# ---- environments: reused while what they are made from is unchanged, made anew if their making was interrupted

.venv/.ok: constraints.txt
.venv/.ok: packages = -c constraints.txt -e '.[dev,examples]'
.venv-interop/.ok: constraints.txt
.venv-interop/.ok: packages = -c constraints.txt -e '.[dev,interop]'
.venv-mmengine/.ok: constraints.txt
.venv-mmengine/.ok: packages = -c constraints.txt -e '.[dev,mmengine]'
.venv-floors/.ok: constraints-floors.txt
.venv-floors/.ok: packages = -c constraints-floors.txt -e '.[dev,examples]'

.venv/.ok .venv-interop/.ok .venv-mmengine/.ok .venv-floors/.ok: settings.ini setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(MIN_PYTHON)".split("."))))' || { \
	  echo "learner needs Python $(MIN_PYTHON) or newer, which '$(PYTHON)' is not; name one: make PYTHON=python3.12 …"; \
	  exit 1; }
	@echo "Setting up $(@D); this takes a minute or two, once."
	@test -x $(@D)/bin/pip && test ! -e $(@D)/.begun || $(PYTHON) -m venv --clear $(@D)
	@touch $(@D)/.begun
	$(@D)/bin/pip install -q --disable-pip-version-check $(packages)
	@mv $(@D)/.begun $@
