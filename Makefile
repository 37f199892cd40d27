# make demo   a small DenseNet, plain and selective; make test   the whole suite; make check   lint, types, wheel;
# make docs   the documentation site
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test check format figures architectures tutorial docs soak results bench-check gpu-check compat release clean

demo: $(VENV)/.train
	$(BIN)/python examples/demo.py

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_site.py
	rm -rf dist && $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python tests/support/check_wheel.py dist

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

figures: $(VENV)/.dev
	$(BIN)/python docs/figures/make_figures.py

architectures: $(VENV)/.dev
	$(BIN)/python -m soak.convs
	$(BIN)/python -m soak architectures

# Random trials that try to break things: hours. They go on where they stopped.
soak: $(VENV)/.dev
	$(BIN)/python -m soak

tutorial: $(VENV)/.dev
	$(BIN)/python docs/tutorial/make_start.py
	$(BIN)/jupyter execute --inplace examples/look_inside.ipynb

# The documentation site, strictly and offline, into site/.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean

# sdist and wheel into dist/, checked, and the wheel tried in an empty environment.
release: $(VENV)/.dev
	rm -rf dist && $(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/support/check_wheel.py dist --try

# The tables, pages and summaries of results/ from the runs' files.
results: $(VENV)/.dev
	for grid in table1 table2 table3 ablation; do [ ! -d results/$$grid/runs ] || \
		$(BIN)/selectconv reproduce $$grid --scale reduced --no-run --out results/$$grid || exit 1; done
	$(BIN)/python results/make_summary.py

# The recorded ratios of benchmarks/ratios.json against today's; fails beyond the margin.
bench-check: $(VENV)/.test
	$(BIN)/python benchmarks/check_ratios.py

# For someone with a CUDA device: tests, the Triton kernel against the definition, times.
gpu-check: $(VENV)/.test
	$(BIN)/python benchmarks/gpu_check.py

# Unit and integration tests with the oldest, pinned and newest versions; hours, and 20 GB for a while.
compat:
	$(PYTHON) tests/support/compat.py

# torch goes first and alone: what else is asked for must not choose another build of it.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	touch $@

$(VENV)/.train: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@ $(VENV)/.train

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.train $(VENV)/.test

clean:
	rm -rf $(VENV) build dist site
