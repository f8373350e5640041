# The commands of the project. `make` lists them.
#
#   PYTHON=/path/to/python   the interpreter to build the environment with
#   SYSTEM_SITE=1            fetch nothing: use the packages that PYTHON has, in
#                            .venv-system (a machine without a network)
#   JAX=0.12                 the high end of the supported range, in .venv-latest
#   ARGS="-k tma"            more arguments for pytest

JAX ?= 0.11.2
VENV ?= $(if $(SYSTEM_SITE),.venv-system,$(if $(filter 0.11.2,$(JAX)),.venv,.venv-latest))
WORKERS ?= 2
ARGS ?=

comma := ,
BIN := $(VENV)/bin
# A module run by `python -m` works in an environment that only links its maker's
# packages, where bin/ has no scripts.
RUN := $(BIN)/python -m
PYTEST := $(RUN) pytest -q -n $(WORKERS) --dist worksteal

# Where Python is told to write no bytecode, every process of the tests compiles the
# sources again, for a tenth of the suite's time. What is written is in .gitignore.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-torch smoke check check-tests static tiers tiers-choose format format-check lint types \
	composition-table coverage-table golden layout-drawings porting-table rules-table sparsecore-table map clean clean-all

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | \
		while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

setup:  ## make the environment and install into it (does nothing when up to date)
	@python="$$(PYTHON='$(PYTHON)' NEED_MODULE='$(if $(SYSTEM_SITE),jax)' \
		sh tools/find_python.sh)" && \
	"$$python" tools/setup_venv.py --venv '$(VENV)' \
		--constraints 'tools/constraints-$(JAX).txt' \
		$(if $(filter 0.11.2,$(JAX)),--extras dev$(comma)offline$(comma)tpu) \
		$(if $(SYSTEM_SITE),--system-site) $(if $(PYTHON),--python-was-named)

demo: setup  ## first light: emulator, offline compiler, and a GPU if there is one
	@$(BIN)/python demo/first_light.py

test: setup  ## the default tier, in six to seven minutes; with JAX=0.12 the nightly run
	$(PYTEST) --tier=default $(ARGS)

test-all: setup  ## the default tier, then all other tests: what has to pass to land
	$(PYTEST) --tier=default $(ARGS)
	$(PYTEST) --tier=rest $(ARGS)

test-torch: setup  ## installs torch, which is 3 GB, and runs the tests that need it
	$(RUN) pip install --quiet 'torch>=2.11'
	$(PYTEST) $(wildcard tests/bridge/test_torch*.py) $(ARGS)

smoke: setup  ## the short set; with JAX=0.12 on the high end of the supported range
	$(PYTEST) -m smoke $(ARGS)

check: setup  ## format, lint, types and the smallest tier: before every commit
	@$(MAKE) --no-print-directory --jobs=2 static check-tests

check-tests: setup
	$(PYTEST) --tier=check $(ARGS)

tiers: setup  ## measure all tests, run the mutants, and choose the tiers' tests
	rm -rf .tiers
	$(PYTEST) -p tools.tiers.record --tier=measured $(ARGS)
	$(RUN) tools.tiers mutants
	$(RUN) pytest -q -p tools.tiers.kills --tier=measured
	$(RUN) tools.tiers clean
	$(RUN) pytest -q -p tools.tiers.kills --tier=measured
	$(RUN) tools.tiers choose

tiers-choose: setup  ## choose the tiers' tests again from what `make tiers` has measured
	$(RUN) tools.tiers choose

static: format-check lint types

format: setup  ## rewrite the source in the project's format
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

format-check: setup
	$(RUN) ruff format --check .

lint: setup  ## ruff's rules
	$(RUN) ruff check .

types: setup  ## mypy
	$(RUN) mypy

golden: setup  ## rewrite the texts that tests expect; ARGS=tests/types for some
	$(RUN) pytest -q --golden $(or $(ARGS),$(shell grep -rlE 'support.refusal|golden.compare' --include 'test_*.py' tests))

coverage-table: setup  ## regenerate docs/coverage.md from the registry of primitives
	$(RUN) tools.coverage_table

porting-table: setup  ## regenerate docs/porting.md from tools/porting_names.py
	$(RUN) tools.porting_table

sparsecore-table: setup  ## regenerate docs/sparsecore_operations.md from compiles by libtpu
	JAX_PLATFORMS=cpu $(RUN) tools.sparsecore_table

composition-table: setup  ## regenerate docs/composition.md from the tests' programs
	$(RUN) tools.composition_table

rules-table: setup  ## regenerate docs/rules.md, and the rules and kinds in docs/checking.md, docs/explain.md and their schemas
	$(RUN) tools.rules_table

layout-drawings: setup  ## regenerate docs/layouts.md and its pictures
	$(RUN) tools.layout_drawings

map: setup  ## bring MAP.md's list of files up to date
	$(RUN) tools.update_map

clean:  ## remove caches and builds
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

clean-all: clean  ## remove the environments too
	rm -rf .venv .venv-latest .venv-system
