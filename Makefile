# Each target makes .venv by itself when there is none. `make install` again after changing pyproject.toml.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO_STAMP := .venv/.installed-for-the-demo
PIP_OPTIONS := --quiet --disable-pip-version-check -c constraints.txt
INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS)
DIST_INSTALL := out/dist/bin/python -m pip install $(PIP_OPTIONS)

.PHONY: install test test-core test-slow fuzz demo docs lint bench dist clean

install: $(STAMP)  ## make .venv and install setstream with its development tools

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing setstream with all extras and development tools into .venv: some minutes"
	$(INSTALL) -e ".[dev]"
	touch $(STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing setstream, its command and its figures into .venv: some minutes, 1.6 GB, most of it PyTorch"
	$(INSTALL) -e ".[cli,report,serve,sklearn]"
	touch $(DEMO_STAMP)

# One thread a worker: two workers on two cores are faster than one worker with two threads.
test: $(STAMP)  ## the laws, the unit tests, every doctest and every code block of the docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

# For other versions of torch than the pinned one: what needs torch, numpy and safetensors, and the command line.
CORE := laws gradients pools states models stores/test_store.py training
test-core: pyproject.toml constraints.txt  ## the core's tests, in an environment with few libraries
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[cli,data,sklearn]" pytest pytest-xdist hypothesis
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup $(addprefix tests/,$(CORE)) src/setstream/states src/setstream/pools src/setstream/models

test-slow: $(STAMP)  ## what takes minutes: 10^7 elements in flat memory, deep property search
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m slow
	HYPOTHESIS_PROFILE=deep OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/laws

fuzz: $(STAMP)  ## 110,000 damaged inputs to every reader and to a server on this machine: up to an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz

# Much less than the development tools, unless they are there already.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))  ## one set in four streams through five trained models; writes out/demo
	$(BIN)/setstream demo --out out/demo
	@echo "live       $(BIN)/setstream serve"

docs: $(STAMP)  ## the site, in out/docs; a broken link or a docstring that does not render is an error
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs out/docs
	@echo out/docs/index.html

lint: $(STAMP)  ## ruff (style, imports, docstrings) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## pooling speed against the direct form and torch SDPA, in one run
	$(BIN)/python benchmarks/pooling.py

# The wheel, then the sdist, in an environment of its own with nothing but their dependencies.
dist: $(STAMP)  ## a wheel and an sdist in dist/, each installed into an empty environment and tried
	rm -rf dist out/dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(PYTHON) -m venv out/dist
	$(DIST_INSTALL) dist/*.whl
	out/dist/bin/python tests/smoke.py
	$(DIST_INSTALL) "$$(echo dist/*.whl)[cli]"
	out/dist/bin/python tests/smoke.py --cli
	$(DIST_INSTALL) --force-reinstall --no-deps dist/*.tar.gz
	out/dist/bin/python tests/smoke.py --cli
	rm -rf out/dist

clean:
	rm -rf .venv out dist
