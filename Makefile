# Two commands from a fresh machine: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What is run and tested is this tree, whatever copy is installed.
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help setup demo bench test test-long test-slow soak sanitize sanitize-gpu gpu emulated-gpu neon docs wheel lint clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP)  ## the virtual environment .venv, with everything in it

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "softfocus needs Python 3.11 or newer, this is %d.%d: run make PYTHON=python3.12 (say)" % sys.version_info[:2])'
	@echo "Making $(VENV). Packages are downloaded and the CPU kernels compiled: some ten minutes, the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch>=2.11,<2.14'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(BIN)/softfocus build || echo "Going on without the CPU kernels: attention runs on the slower tiled backend."
	@touch $@

demo: setup  ## train Softmax, LSSA, LSSAR and two layouts, evaluate at 16 times the length (some 12 minutes)
	$(BIN)/softfocus demo

bench: setup  ## time attention on the CPU beside torch's own, with parity checks; writes runs/bench-cpu/
	$(BIN)/softfocus bench --device cpu

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --no-loadscope-reorder
test: setup  ## all tests but those marked long or slow (three to six minutes on two cores)
	$(PYTEST) --dist loadfile -m "not long and not slow and not soak"

test-long: setup  ## the tests of over 1.5 seconds, which `make test` leaves out; CI runs them (five to nine minutes)
	$(PYTEST) --dist loadfile -m "long and not slow and not soak"

test-slow: setup  ## the tests of minutes, which CI leaves out: all architectures, claims from the first run to the page
	$(PYTEST) --dist loadfile -m "slow"

soak: setup  ## trainings killed at 50 random points must end with the same weights (some five minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak -q

# The compiler runs without the sanitizer that is loaded into Python. Fresh memory is filled with
# NaN, and none is kept for the next call: what is never written, or no longer there, is noticed.
SANITIZE := -O2 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -DSOFTFOCUS_POOL_BYTES=0
sanitize: setup  ## the CPU kernels' tests under ASan and UBSan (some 20 minutes; needs GCC)
	SOFTFOCUS_KERNEL_CACHE=$(CURDIR)/.sanitized SOFTFOCUS_CXXFLAGS="$(SANITIZE)" CXX="env -u LD_PRELOAD g++" \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:malloc_fill_byte=255:max_malloc_fill_size=1073741824 UBSAN_OPTIONS=print_stacktrace=1 \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -x -s -q tests/core/test_cpu.py tests/core/test_repeated_calls.py tests/core/test_fuzz.py \
	  tests/core/test_edges.py tests/core/test_visibility.py tests/core/test_validation.py -k "test_cpu or test_repeated or test_fuzz or cpu"

# Memory comes from the driver each time, so that what lies beyond a tensor is not another tensor's.
sanitize-gpu: setup  ## the Triton kernels' tests under compute-sanitizer (needs a GPU and the CUDA toolkit)
	@command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not on PATH: it comes with the CUDA toolkit"; exit 1; }
	for tool in memcheck racecheck synccheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 SOFTFOCUS_TUNE=off compute-sanitizer --tool $$tool --target-processes all --error-exitcode 1 \
	    $(BIN)/python -m pytest -x -q -m gpu tests/core/test_triton.py tests/core/test_cache.py -k "not cuda_graph and not compiled" || exit 1; \
	done

# Runs from the source tree with the PYTHON that has torch: the machine may be one where nothing can
# be installed.
STAGE ?= 1
gpu:  ## on a GPU: STAGE=1 to 4, each under nine minutes; writes runs/gpu/ (DRY=--dry-run: without one)
	$(PYTHON) tests/gpu/stages.py $(STAGE) $(DRY)

# Nothing is timed: an emulator executes what Triton compiled, with errors, races and late copies as
# the hardware may have them.
emulated-gpu: setup  ## the Triton kernels' tests on an emulated sm_80 and sm_90 (ten minutes at first, then two)
	for arch in 80 90; do \
	  SOFTFOCUS_EMULATED_ARCH=$$arch OMP_NUM_THREADS=1 PYTHONPATH="tests/emulated/gpu:$$PYTHONPATH" \
	    $(BIN)/python -m pytest -p plugin -q tests/core/test_triton.py tests/core/test_cache.py || exit 1; \
	done

# Nobody here has such a machine: the kernels run under an emulator, called from the tests in this
# machine's Python. On Debian: apt install g++-aarch64-linux-gnu qemu-user-static.
NEON := .emulated/neon
neon: setup $(NEON)  ## the CPU kernels' parity tests as 64-bit ARM under qemu (an hour)
	SOFTFOCUS_EMULATED="qemu-aarch64-static $(NEON)" OMP_NUM_THREADS=1 PYTHONPATH="tests/emulated/arm:$$PYTHONPATH" \
	$(BIN)/python -m pytest -p plugin -q tests/core/test_cpu.py -k "test_parity or few"

$(NEON): tests/emulated/arm/call.cpp $(wildcard src/softfocus/backends/cpu/csrc/*)
	mkdir -p $(dir $@)
	aarch64-linux-gnu-g++ -std=c++17 -O3 -fno-math-errno -fno-trapping-math -fopenmp -static -mcpu=cortex-a76 \
	  tests/emulated/arm/call.cpp src/softfocus/backends/cpu/csrc/*.cpp -o $@

docs: setup  ## the tests of the documentation: pages against code and committed results
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/documents tests/test_examples.py tests/hf/test_docs.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "slow or not slow" tests/core/test_contract.py -k guide

wheel: setup  ## build the wheel, install it into an environment of its own, and use it there
	rm -rf dist .wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv .wheel
	.wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/softfocus-*.whl 'torch>=2.11,<2.14'
	cd dist && env -u PYTHONPATH ../.wheel/bin/python -c 'import torch, softfocus; x = torch.randn(1, 2, 9, 8); print(softfocus.__version__, softfocus.attention(x, x, x).shape)'

lint: setup  ## ruff, clang-format and mypy
	$(BIN)/ruff check src tests docs examples
	$(BIN)/ruff format --check src tests docs examples
	$(BIN)/clang-format --dry-run -Werror $$(find src tests -name '*.cpp' -o -name '*.h')
	$(BIN)/mypy

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .wheel .sanitized .emulated .pytest_cache .mypy_cache .ruff_cache .hypothesis
