# Two commands matter: `make run` and `make test`. The first call makes .venv from requirements.lock.

PYTHON      ?=
TORCH_INDEX ?=
ENV         ?= venv
NB          ?=
export PYTHON TORCH_INDEX

ifeq ($(ENV),venv)
  python := .venv/bin/python
  setup  := sh tools/setup.sh
else ifeq ($(ENV),current)
  python := $(or $(PYTHON),python)
  setup  := $(python) tools/environment.py --current
else
  $(error ENV must be venv (the default: makes .venv) or current (the active environment), got "$(ENV)")
endif

.DEFAULT_GOAL := help
.PHONY: help run test lab notebooks docs lint format lock clean

help:  ## this list
	@echo "evolve: from GPT-2 to Kimi K3 in nine executable notebooks"
	@echo
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18
	@echo
	@echo "  NB=notebooks/01_full_attention.ipynb   only this one (run, notebooks)"
	@echo "  ENV=current                            use the active (conda) environment, not .venv"
	@echo "  PYTHON=python3.13                      make .venv with this Python"
	@echo "  TORCH_INDEX=URL                        one more package index, for another build of PyTorch"

run:  ## execute every notebook into build/notebooks/, then print the scoreboard
	@$(setup) notebooks
	@$(python) tools/notebooks.py run $(NB)

test:  ## unit tests, notebooks against their saved outputs, lint, site
	@$(setup) dev
	@$(python) tools/test.py

lab:  ## open JupyterLab on the series
	@$(setup) notebooks
	@$(python) -m jupyterlab notebooks

notebooks:  ## execute every notebook and refresh the saved outputs: all or none
	@$(setup) notebooks
	@$(python) tools/notebooks.py refresh $(NB)

docs:  ## build the site from the saved outputs into build/site/
	@$(setup) docs
	@$(python) tools/docs.py

lint:  ## ruff check and format check, notebooks included
	@$(setup) dev
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .

format:  ## let ruff fix and format
	@$(setup) dev
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

lock:  ## resolve the dependencies anew into requirements.lock
	@$(setup) notebooks
	@sh tools/lock.sh $(python)

clean:  ## remove everything built; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	find . -name .ipynb_checkpoints -not -path './.venv/*' -prune -exec rm -rf {} +
