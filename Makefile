# make train    set up, train or resume the default experiment, and write its report.html
# make test     set up, run the tests
# make test-fast set up, run the tests of what has changed, about a minute
# make test-all the same as make test, then additional cases (make test-extended)
# make check    set up, run ruff and mypy
# make compat   set up, run a part of the tests with each version of torch that is tested (downloads gigabytes)
# make bench    set up, compare the speed with other frameworks on this machine
#
#   make train CONFIG=configs/debug.toml ARGS="--train.steps=50"    another experiment, other values
#   make train NPROC=4                                              default: one process per GPU, or 2 on a CPU
#   make PYTHON=python3.12 train                                    another interpreter (3.11 or newer)

PYTHON ?= python3
CONFIG ?=
ARGS ?=
NPROC ?=

# tests wait at times, so use one more worker than cores
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n + 1 : 5)))

VENV := .venv
PY := $(VENV)/bin/python
OPTIONS = $(if $(CONFIG),--config $(CONFIG)) $(ARGS)
# a new worker in place of one that has crashed would wait for ever (pytest-xdist 3.8)
PYTEST = HF_HUB_OFFLINE=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
PROCESSES = $(or $(NPROC),$$($(PY) -c 'import torch; print(torch.cuda.device_count() or 2)'))

.PHONY: train test test-fast test-extended test-all check compat bench clean
.DEFAULT_GOAL := train

# OMP_NUM_THREADS=1 is torchrun's default, without its warning; train.py then applies [run] threads.
# --local-addr: otherwise the ranks meet at this machine's hostname, which may not resolve
train: $(VENV)/.installed
	@n=$(PROCESSES); \
	WORLD_SIZE=$$n LOCAL_WORLD_SIZE=$$n $(PY) train.py --check-config $(OPTIONS) >/dev/null && \
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node $$n train.py $(OPTIONS) && \
	{ WORLD_SIZE=$$n $(PY) -m torchtitan_lite.report $(OPTIONS) || echo "training is complete, but the report failed"; }

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not extended"

test-fast: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not extended" $$($(PY) -m tests.fast)

test-extended: $(VENV)/.installed-dev
	$(PYTEST) -m "extended and not slow"

test-all: test test-extended

check: $(VENV)/.installed-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

compat: $(VENV)/.installed-dev
	$(PY) -m tests.compat $(ARGS)

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
