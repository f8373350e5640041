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

BIN := $(VENV)/bin
# A module run by `python -m` works in an environment that only links its maker's
# packages, where bin/ has no scripts.
RUN := $(BIN)/python -m
PYTEST := $(RUN) pytest -q -n $(WORKERS) --dist worksteal

# Where Python is told to write no bytecode, every process of the tests compiles the
# sources again, for a tenth of the suite's time. What is written is in .gitignore.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test smoke fast quick check static format format-check lint types \
	composition-table coverage-table golden layout-drawings porting-table map clean clean-all

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | \
		while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

setup:  ## make the environment and install into it (does nothing when up to date)
	@python="$$(PYTHON='$(PYTHON)' NEED_MODULE='$(if $(SYSTEM_SITE),jax)' \
		sh tools/find_python.sh)" && \
	"$$python" tools/setup_venv.py --venv '$(VENV)' \
		--constraints 'tools/constraints-$(JAX).txt' \
		$(if $(SYSTEM_SITE),--system-site) $(if $(PYTHON),--python-was-named)

demo: setup  ## first light: emulator, offline compiler, and a GPU if there is one
	@$(BIN)/python demo/first_light.py

test: setup  ## all tests
	$(PYTEST) $(ARGS)

fast: setup  ## the tests that are not slow and compile nothing
	$(PYTEST) -m "not slow and not offline" $(ARGS)

smoke: setup  ## the short set; with JAX=0.12 on the high end of the supported range
	$(PYTEST) -m smoke $(ARGS)

quick: setup  ## up to three cases of each file, fewer of those with long ones
	$(PYTEST) -m quick $(ARGS)

check: setup  ## format, lint, types and `quick`, in two minutes: before every commit
	@$(MAKE) --no-print-directory --jobs=2 static quick

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
	$(RUN) pytest -q --golden $(or $(ARGS),$(shell grep -rl support.refusal --include 'test_*.py' tests))

coverage-table: setup  ## regenerate docs/coverage.md from the registry of primitives
	$(RUN) tools.coverage_table

porting-table: setup  ## regenerate docs/porting.md from tools/porting_names.py
	$(RUN) tools.porting_table

composition-table: setup  ## regenerate docs/composition.md from the tests' programs
	$(RUN) tools.composition_table

layout-drawings: setup  ## regenerate docs/layouts.md and its pictures
	$(RUN) tools.layout_drawings

map: setup  ## bring MAP.md's list of files up to date
	$(RUN) tools.update_map

clean:  ## remove caches and builds
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

clean-all: clean  ## remove the environments too
	rm -rf .venv .venv-latest .venv-system
