# make train    set up, train the default experiment, or continue it; then write its report.html
# make test     set up, run the tests: every promise has its test here
# make test-all the same, then more cases of what they hold (make test-extended)
# make check    set up, ruff and mypy
# make bench    set up, compare the speed with others' on this machine
#
#   make train CONFIG=configs/debug.toml ARGS="--train.steps=50"    another experiment, other values
#   make train NPROC=4                                              other than one process per GPU, or 2 on a CPU
#   make PYTHON=python3.12 train                                    another interpreter (3.11 or newer)

PYTHON ?= python3
CONFIG ?=
ARGS ?=
NPROC ?=

# tests wait now and then: one worker more than cores
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 5)))

VENV := .venv
PY := $(VENV)/bin/python
OPTIONS = $(if $(CONFIG),--config $(CONFIG)) $(ARGS)
PYTEST = HF_HUB_OFFLINE=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PROCESSES = $(or $(NPROC),$$($(PY) -c 'import torch; print(torch.cuda.device_count() or 2)'))

.PHONY: train test test-extended test-all check bench clean
.DEFAULT_GOAL := train

# torchrun gives each process one thread unless told otherwise, and warns; train.py then sets [run] threads
train: $(VENV)/.installed
	@n=$(PROCESSES); \
	WORLD_SIZE=$$n LOCAL_WORLD_SIZE=$$n $(PY) train.py --check-config $(OPTIONS) >/dev/null && \
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node $$n train.py $(OPTIONS) && \
	{ WORLD_SIZE=$$n $(PY) -m torchtitan_lite.report $(OPTIONS) || echo "the training is done, only its report is missing"; }

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not extended"

test-extended: $(VENV)/.installed-dev
	$(PYTEST) -m "extended and not slow"

test-all: test test-extended

check: $(VENV)/.installed-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(VENV)/.installed-bench
	$(PY) -m benchmarks.train $(ARGS)

$(VENV)/.installed: pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV) "[report]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV) "[dev]"
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV) "[bench]"
	@touch $@

clean:
	rm -rf $(VENV)
