# make demo | test | test-all | test-slurm | lint. The environment is made in .venv, and again only when requirements change.
# Tests run JOBS at a time, each of one to four processes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-slurm lint env
env: $(READY)

$(READY): requirements.txt requirements-dev.txt
	@command -v $(PYTHON) > /dev/null || { echo "error: no $(PYTHON) here; run: make PYTHON=PATH $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# Text -> tokens -> a model trained on two processes -> a verdict on its curve -> perplexity -> a page of text -> a Hugging Face directory.
# Interrupted, `make demo` goes on where it was; `rm -r data/demo ckpt/demo ckpt/demo_hf` starts it over.
demo: $(READY)
	PYTHON=$(BIN)/python launch/demo.sh

test: $(READY)
	$(PYTEST) -m "not slow and not slurm"

test-all: $(READY)
	$(PYTEST) -m "not slurm"

# All that launch/*.sbatch promise, on a Slurm cluster made for it on this machine; needs root and Debian's slurm-wlm.
test-slurm: $(READY)
	$(PYTEST) tests/slurm

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck launch/*.sh bench/*.sh launch/*.sbatch launch/cluster.env .ci/run
