# Every verb does the set-up it needs: a bare clone, Python 3.11+ and make are enough.

PYTHON ?= python3
# Test processes side by side: two more than two cores, because whoever waits for other processes needs none.
JOBS ?= 4
# Which benchmarks `make bench` runs.
BENCH ?= $(sort $(wildcard benchmarks/*.py))
# Seconds of processor time that `make test` may take on two idle cores, over all its processes.
BUDGET_S := 850

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
COMPILING := PYTHONDONTWRITEBYTECODE= PYTHONPATH=$(CURDIR)/src $(BIN)/python
PACKAGES := $(VENV)/.packages
RUNTIME := $(VENV)/.imported $(VENV)/.kernels
DEV := $(VENV)/.dev
INTEGRATIONS := $(VENV)/.integrations
DOCS := $(VENV)/.docs

.DEFAULT_GOAL := help
.PHONY: help setup run test integrations docs check format bench faults dist clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install all that the other verbs need into .venv
	@$(MAKE) --no-print-directory -j 2 $(RUNTIME) $(DEV)

run: $(RUNTIME) ## the first run: four learners, one is killed and comes back
	$(BIN)/atoll train --out atoll-runs/first --demo

# Every worker collects every test: one process writes their bytecode first, so that no worker rewrites them. The checks
# run beside all that; their output comes last.
test: setup ## the checks, and every test but the long ones of `make faults`
	@said=$$(mktemp); $(MAKE) --no-print-directory check >$$said 2>&1 & checks=$$!; \
	export PYTHONDONTWRITEBYTECODE=; $(BIN)/pytest --collect-only -q >/dev/null 2>&1; \
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 30; tests=$$?; \
	wait $$checks; checked=$$?; cat $$said; \
	times >$$said; awk 'END { split($$1 "m" $$2, of, "m"); \
	    printf "processor time: %d s of $(BUDGET_S)\n", 60 * (of[1] + of[3]) + of[2] + of[4] }' $$said; \
	rm -f $$said; test $$tests = 0 -a $$checked = 0

integrations: $(RUNTIME) $(INTEGRATIONS) ## the examples, also those with transformers and peft, deployments: at most 10 minutes
	$(BIN)/pytest tests/integrations -m 'integrations and not faults' -n 3 --dist loadfile --no-loadscope-reorder --durations 15 --session-timeout 2400

docs: $(DOCS) ## the documentation as a site, strictly: build/site/index.html
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/site.py

check: $(DEV) ## ruff, mypy --strict, the layers of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(RUNTIME) $(DEV) ## the benchmarks; one of them: make bench BENCH=benchmarks/NAME.py
	@set -e; for bench in $(BENCH); do echo "== $$bench"; $(BIN)/python $$bench; done

faults: $(RUNTIME) $(INTEGRATIONS) ## the long tests: fault campaigns, and all cases of what the others sample
	$(BIN)/pytest tests tests/integrations -m faults --timeout 3600

dist: $(PACKAGES) ## wheel and sdist, their contents checked; installed for Pythons: make dist PYTHONS="python3.11 python3.13"
	@$(PIP) build hatchling twine
	$(BIN)/python tools/dist.py $(PYTHONS)

clean: ## remove .venv and every cache; runs stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps, so that a first run does not wait for the tools of development, and those do not wait for what is compiled.
# Compiling all of torch takes half of an install and most of it is never imported: so one import compiles what is, even
# where Python is told to write none. It finds our source by its path: pip may be putting it in place anew meanwhile.
# The pip that comes with Python 3.11 spends half of an install on looking at wheels for other machines.
$(PACKAGES): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Atoll needs Python 3.11 or newer and '$(PYTHON)' is not: name another one, as in make PYTHON=python3.12 setup" >&2; exit 1; }
	@echo "Installing Atoll into $(VENV): a minute or two the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --no-compile 'pip>=25' 2>/dev/null || true
	@$(PIP) --no-compile -e '.[torch,plots]'
	@touch $@

$(VENV)/.imported: $(PACKAGES)
	@$(COMPILING) -c 'import torch, rich.live, atoll.cli, atoll.courier.service, atoll.syncer.service, \
	    atoll.workloads.builtin; atoll.evaluate; torch.optim.AdamW([torch.zeros(1, requires_grad=True)])'
	@$(BIN)/python -m compileall -q src/atoll
	@touch $@

$(VENV)/.kernels: $(PACKAGES)
	@$(COMPILING) -c 'from atoll.numerics import kernels; kernels.warm()'
	@touch $@

# By their names: with -e Atoll itself would be built a second time.
$(DEV): $(PACKAGES)
	@echo "Installing the tools of development."
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*project["optional-dependencies"]["dev"], sep="\n")' >$@.txt
	@$(PIP) --no-compile -r $@.txt
	@touch $@

$(INTEGRATIONS): $(DEV)
	@echo "Installing the libraries that tests/integrations uses."
	@$(PIP) -e '.[integrations]'
	@$(COMPILING) -c 'import atoll.integrations.hf, atoll.integrations.lightning, atoll.integrations.jax, flax.nnx, datasets, peft'
	@touch $@

$(DOCS): $(PACKAGES)
	@echo "Installing what builds the site."
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	    print(*project["optional-dependencies"]["docs"], sep="\n")' >$@.txt
	@$(PIP) --no-compile -r $@.txt
	@touch $@
