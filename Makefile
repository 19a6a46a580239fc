# make demo | test-fast | test | test-all | gpu | lint | typecheck | docs | bench | models | integrations. Each makes .venv first, once.
#
#   PYTHON=python3.12   the interpreter that .venv is made from (3.11 or newer)
#   TORCH_INDEX=URL     an extra package index with CPU builds of torch (see the install page of pytorch.org); without
#                       it pip takes the torch it finds, which on Linux may be the larger CUDA build: both work
#   PY=/path/to/python  use this interpreter as it is, and make no .venv
#   JOBS=4              test processes (3: some wait for processes of their own)
#   ARGS=--rehearse     of `make gpu`

PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 3
VENV := .venv
STAMP := $(VENV)/.installed

ifdef PY
READY :=
else
READY := $(STAMP)
PY := $(VENV)/bin/python
endif

export OMP_NUM_THREADS = 1
PYTEST := $(PY) -m pytest -q -n $(JOBS) --dist worksteal

.PHONY: help demo test-fast test test-all gpu lint typecheck docs docs-serve bench models integrations clean
help:
	@sed -n '1,9s/^# \{0,1\}//p' Makefile

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "autopar needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed (on Debian: install python3-venv)"; exit 1; }
	$(VENV)/bin/python -m pip install --quiet --no-input -c constraints.txt setuptools
	$(VENV)/bin/python -m pip install --quiet --no-input -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(VENV)/bin/python -m pip install --quiet --no-input -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(PY) examples/train_gpt.py

# The inner loop: the house, the nouns, the solvers and schedules on hand-made inputs, one small model end to end.
FAST := tests/test_house.py tests/ir tests/cluster tests/costmodel/test_collective.py tests/costmodel/test_simulate.py \
	tests/oracles tests/passes/check tests/passes/rules tests/passes/stage tests/passes/branch tests/passes/place \
	tests/passes/price tests/passes/memory tests/passes/shard/test_solver.py tests/passes/schedule/test_proof.py \
	tests/passes/search/test_schedule_choice.py tests/passes/search/test_segment_chain.py tests/passes/search/test_submesh.py \
	tests/passes/search/test_within_memory.py tests/runtime/comm/test_threads.py tests/runtime/gradients/test_grads.py \
	tests/runtime/program/test_order.py tests/runtime/program/test_transfer.py tests/capture/examples/test_trees.py tests/capture/examples/test_inputs.py \
	tests/report/test_gantt.py
SMALL := "tests/zoo/test_zoo.py::test_training_equals_one_device[4-mlp]" "tests/zoo/test_zoo.py::test_inference_equals_one_device[2-mlp]"
test-fast: $(READY)
	$(PYTEST) -m "not slow" $(FAST) $(SMALL)

test: $(READY)
	$(PYTEST) -m "not slow"

test-all: $(READY)
	$(PYTEST)

# One report of this machine's GPUs, a file to send (benchmarks/gpu_report): ARGS="--parts facts,steps", ARGS=--rehearse without one.
gpu: $(READY)
	$(PY) -m benchmarks.gpu_report $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# mypy reads the source tree by package name, so it is shown the tree as it installs.
TYPED := build/typed
typecheck: $(READY)
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/autopar
	@ln -s $(CURDIR)/autopar/* $(TYPED)/autopar/
	@for wing in passes costmodel codegen; do ln -s $(CURDIR)/$$wing $(TYPED)/autopar/$$wing; done
	@ln -s $(CURDIR)/benchmarks $(CURDIR)/examples $(TYPED)/
	cd $(TYPED) && $(if $(findstring /,$(firstword $(PY))),$(abspath $(PY)),$(PY)) -m mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p autopar -p benchmarks

# The pages as a site in build/site, which needs no network; a warning fails. The extra `docs` has what builds it.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs
docs: $(READY)
	$(PY) -m pip install --quiet --no-input -c constraints.txt -e '.[docs]'
	$(MKDOCS) build --strict --quiet

docs-serve: docs
	$(MKDOCS) serve

bench: $(READY)
	$(PY) benchmarks/compile_time.py --quick
	$(PY) benchmarks/peers.py
	$(PY) -m benchmarks.one_rank
	$(PY) benchmarks/guards.py
	$(PY) benchmarks/pipeline.py
	$(PY) benchmarks/memory.py --zero3 --recompute

# Architectures of transformers, diffusers and others (the extra `models`), tried one by one: about half an hour.
SWEEP := build/models.jsonl
models: $(READY)
	$(PY) -m pip install --quiet --no-input -c constraints.txt -e '.[models]'
	$(PY) -m pip install --quiet --no-input --no-deps timm==1.0.31  # without torchvision, which its models do not need
	@mkdir -p $(dir $(SWEEP))
	$(PY) -m benchmarks.architectures.sweep $(SWEEP)
	$(PY) -m benchmarks.architectures.page $(SWEEP) docs/models.md

# Scripts of other packages' trainers (the extra `integrations`) against the same on one device.
integrations: $(READY)
	$(PY) -m pip install --quiet --no-input -c constraints.txt -e '.[integrations]'
	$(PY) -m pytest -q -n 0 tests/integrations

clean:
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis
