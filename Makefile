# megatron-switch on a fresh machine: `make demo`, `make test`. `make help` lists the rest.
#
# Everything runs in .venv, which is made and filled on first use. In a container that already
# has torch, say `make demo PYTHON=python`: then nothing is made, and nothing of its is replaced.

SHELL := /bin/sh
VENV := .venv
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Images often ask for no .pyc files. The tests start hundreds of processes, and each would compile
# the whole package, and each test file, again; `make clean` deletes what that leaves.
export PYTHONDONTWRITEBYTECODE :=

# Only from make's command line: a PYTHON in the environment may be there for something else.
ifeq ($(origin PYTHON),command line)
PY := $(PYTHON)
PACKAGE := active-environment
READY := active-environment
BENCH := active-environment
NEXT := :
else
PY := $(VENV)/bin/python
# Named by what it was filled from, so that other requirements fill it again: with all that the
# targets need, with the package alone, or with other implementations to measure.
READY := $(VENV)/.filled-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
PACKAGE := $(READY)-package
BENCH := $(READY)-bench
NEXT := echo "To have the command megatron-switch in this shell:  . $(VENV)/bin/activate"
endif

# Many tests run four ranks: more test processes than this only wait for each other.
JOBS := 2
SIDE_BY_SIDE := --numprocesses $(JOBS) --dist worksteal

# The published tables that `make bench` measures: cpu or gpu.
SUITE := cpu

.PHONY: help setup demo test test-fast test-slurm check lint types bench lock clean distclean active-environment

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "Add PYTHON=python to use the active environment instead of $(VENV)."

setup: $(READY) ## make .venv and install into it (once; every other target does it too)
	@$(NEXT)

demo: $(PACKAGE) ## train a small Switch GPT on 4 CPU ranks and show what its experts learned
	@$(PY) -m megatron_switch demo
	@$(NEXT)

test: $(READY) ## run every test
	@$(PY) -m pytest $(SIDE_BY_SIDE) --durations=15

test-fast: $(READY) ## run the tests that are not marked slow
	@$(PY) -m pytest -q $(SIDE_BY_SIDE) -m "not slow and not torchrun and not slurm" --durations=5

test-slurm: $(READY) ## run launch scripts on a SLURM cluster of this host (root; slurm-wlm, munge, shellcheck)
	@$(PY) -m pytest -m slurm --durations=5

check: lint types test-fast ## what must pass before a commit: lint, types, fast tests

lint: $(READY) ## check style, layout of the code and spelling
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m codespell_lib

types: $(READY) ## check types
	@$(PY) -m mypy

bench: $(BENCH) ## time one layer beside other implementations (SUITE=gpu on a GPU)
	@$(PY) -W ignore tools/bench_layer.py --suite $(SUITE)

lock: $(READY) ## write the versions in use to constraints.txt
	@$(PY) tools/lock_versions.py

clean: ## delete what builds and tests leave behind (keeps .venv and runs/)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## the same and .venv
	@rm -rf $(VENV)

# ---------------------------------------------------------------------------------------------

# Candidates are run, not looked up: a pyenv shim is found by `which` and fails all the same, and
# a system Python may come without venv. The first two names are what we want, python3 is a guess.
CANDIDATES = python3.12 python3.13 python3 \
	$(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python $(HOME)/.pyenv/versions/3.13*/bin/python)
PROBE = import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))

$(VENV)/bin/python:
	@for candidate in $(CANDIDATES); do \
		if "$$candidate" -c '$(PROBE)' >/dev/null 2>&1; then \
			echo "Making $(VENV) with $$("$$candidate" --version)."; \
			exec "$$candidate" -m venv $(VENV); \
		fi; \
	done; \
	echo "megatron-switch needs Python 3.12 or 3.13 with its venv module, and none of these is one:"; \
	echo "  $(strip $(CANDIDATES))"; \
	echo "Install one (Debian and Ubuntu: apt-get install python3.12-venv; Fedora: dnf install"; \
	echo "python3.12; anywhere: pyenv install 3.12) and run make again. If yours has another name:"; \
	echo "  NAME -m venv $(VENV) && make setup"; \
	exit 1

ifeq ($(READY),active-environment)

# Targets that need more than the package itself say which of its extras.
test test-fast test-slurm: EXTRAS = test
lint types: EXTRAS = dev
bench: EXTRAS = bench
active-environment:
	@$(PY) tools/check_environment.py $(EXTRAS)

else

# pip says what goes wrong, and the rest to the log.
FILL_LOG := $(VENV)/fill.log
FILL = $(PY) -m pip install --quiet --log $(FILL_LOG) --no-input --disable-pip-version-check \
	--constraint constraints.txt --editable

$(READY): EXTRAS = [test,dev]
$(BENCH): EXTRAS = [bench]
$(READY) $(PACKAGE) $(BENCH): | $(VENV)/bin/python
	@if [ -e $(PACKAGE) ]; then \
		echo "Adding to $(VENV) what this target needs."; \
	elif ls $(VENV)/.filled-* >/dev/null 2>&1; then \
		echo "Requirements have changed: updating $(VENV)."; \
	else \
		echo "Filling $(VENV), once: about 3 GB to download and 6 GB on disk, nearly all of it"; \
		echo "torch with CUDA. It takes minutes; watch with:  tail -f $(FILL_LOG)"; \
	fi
	@$(FILL) '.$(EXTRAS)'
	@find $(VENV) -maxdepth 1 -name '.filled-*' ! -name '$(notdir $(READY))*' -delete
	@touch $(PACKAGE) $@

endif
