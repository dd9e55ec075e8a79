# Two commands: `make demo` and `make test`.  Each does all its own set-up, once, and a second run starts at once.
# Needed beforehand: Python >= 3.11 with venv, a C and C++ compiler, CMake >= 3.21, make, bash.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
BUILD := build
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# An abort in ggml otherwise starts a debugger, and waits for it.
export GGML_NO_BACKTRACE := 1

SOURCES := $(shell find src -type f -not -name '*.pyc')

TOOLS_READY := $(VENV)/.tools-ready
LLAMA_READY := $(VENV)/.llama-ready
PROJECT_READY := $(VENV)/.project-ready
DOCS_READY := $(VENV)/.docs-ready
TYPES_READY := $(VENV)/.types-ready
RAY_READY := $(VENV)/.ray-ready

.PHONY: help setup demo test test-python test-native test-slow test-ray sanitize lint types docs evidence format clean

help:
	@echo "make demo      several sessions on one model, proven isolated (builds a tiny model itself)"
	@echo "make test      all default tests: Python, then native"
	@echo "make test-slow the long ones too"
	@echo "make test-ray  those that start a Ray cluster on this machine"
	@echo "make lint      ruff, flake8-async, mypy"
	@echo "make types     that every public name is fully typed"
	@echo "make docs      the documentation, in docs/_build/index.html"
	@echo "make evidence  re-run and re-write the acceptance records"
	@echo "make format    let ruff rewrite"
	@echo "make sanitize  native tests under AddressSanitizer and UBSan"
	@echo "make clean     remove everything made here, the virtual environment too"

setup: $(PROJECT_READY)

$(TOOLS_READY): constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "Python >= 3.11 with venv is needed: none was found"; exit 1; }
	@command -v cmake >/dev/null || { echo "CMake is needed: none was found"; exit 1; }
	@echo "==> virtual environment in $(VENV)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) scikit-build-core ninja
	@touch $@

# By far the longest step, so it is done on its own, and says how far it is.
$(LLAMA_READY): $(TOOLS_READY)
	@mkdir -p $(BUILD)
	@if $(BIN)/python -c 'import importlib.metadata as m, re, sys; \
		pin = re.search(r"(?m)^llama-cpp-python==(.+)$$", open("constraints.txt").read())[1]; \
		sys.exit(m.version("llama-cpp-python") != pin)' 2>/dev/null; then :; else \
		echo "==> building llama.cpp (once; some minutes on two cores; log: $(BUILD)/llama-cpp-python.log)"; \
		CMAKE_ARGS="$${CMAKE_ARGS:-} -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE=$(CURDIR)/native/libraries-only.cmake" \
		$(BIN)/python -m pip install --verbose --disable-pip-version-check -c constraints.txt llama-cpp-python 2>&1 \
		| tee $(BUILD)/llama-cpp-python.log \
		| awk 'match($$0, /\[[0-9]+\/[0-9]+\]/) { split(substr($$0, RSTART + 1, RLENGTH - 2), n, "/"); \
			p = int(10 * n[1] / n[2]); if (p > last) { last = p; printf "    %d %%\n", 10 * p; fflush() } }' \
		|| { tail -n 40 $(BUILD)/llama-cpp-python.log; exit 1; }; \
	fi
	@touch $@

# Not editable: what is tested is what is installed.  (pytest also warns of the module that makes an install editable.)
$(PROJECT_READY): $(LLAMA_READY) pyproject.toml native/CMakeLists.txt $(wildcard native/src/* native/include/*) $(SOURCES)
	@echo "==> installing hotkv-trio"
	@$(PIP_INSTALL) --no-build-isolation '.[bench,cli,metrics,test]'
	@touch $@

$(DOCS_READY): $(PROJECT_READY)
	@echo "==> installing what builds the documentation"
	@$(PIP_INSTALL) --no-build-isolation '.[cli,docs,metrics]'
	@touch $@

$(TYPES_READY): $(PROJECT_READY)
	@echo "==> installing basedpyright"
	@$(PIP_INSTALL) basedpyright
	@touch $@

$(RAY_READY): $(PROJECT_READY)
	@echo "==> installing Ray"
	@$(PIP_INSTALL) ray
	@touch $@

demo: setup
	@$(BIN)/hotkv-trio demo

test: setup
	@$(MAKE) --no-print-directory test-python
	@$(MAKE) --no-print-directory test-native

test-python: setup
	@$(BIN)/python -W error -X dev -m pytest

test-slow: setup
	@$(BIN)/python -W error -X dev -m pytest -m 'not real_model and not ray'

# Not -W error: Ray has warnings of its own.
test-ray: $(RAY_READY)
	@$(BIN)/python -m pytest -m ray tests/ray

# $(1): folder, $(2): further CMake settings
define native_tests
	@cmake -S native -B $(BUILD)/$(1) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHOTKV_TESTS=ON \
		-DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" $(2) > $(BUILD)/$(1)-configure.log \
		|| { cat $(BUILD)/$(1)-configure.log; exit 1; }
	@cmake --build $(BUILD)/$(1) > $(BUILD)/$(1)-build.log || { cat $(BUILD)/$(1)-build.log; exit 1; }
	@ctest --test-dir $(BUILD)/$(1) --output-on-failure --no-tests=error
endef

test-native: setup
	$(call native_tests,native,)

sanitize: setup
	$(call native_tests,native-sanitize,-DHOTKV_SANITIZE=ON)

# ASYNC124 and 910-913 hold for the library: everything async checkpoints.  A test, and what helps one, may be async
# without need, and poll; its startable helpers (ASYNC114) are nobody else's.
ASYNC_STARTABLE := serve,serve_session,_shielded,_keep,_serve
lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@find src -name '*.py' -not -path '*/testing/*' | xargs $(BIN)/flake8-async --enable ASYNC --disable= \
		--startable-in-context-manager $(ASYNC_STARTABLE)
	@find tests evidence docs src/hotkv_trio/testing -name '*.py' 2>/dev/null | xargs $(BIN)/flake8-async --enable ASYNC \
		--disable ASYNC110,ASYNC111,ASYNC114,ASYNC124,ASYNC910,ASYNC911,ASYNC912,ASYNC913 --startable-in-context-manager $(ASYNC_STARTABLE)
	@$(BIN)/mypy

# PATH: it asks the python that it finds there.
types: $(TYPES_READY)
	@mkdir -p $(BUILD)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/basedpyright --verifytypes hotkv_trio --ignoreexternal \
		> $(BUILD)/types.log || { cat $(BUILD)/types.log; exit 1; }
	@grep 'Type completeness' $(BUILD)/types.log

docs: $(DOCS_READY)
	@$(BIN)/python docs/draw_life_of_a_session.py
	@$(BIN)/sphinx-build --builder html --fail-on-warning --keep-going --quiet --fresh-env docs docs/_build
	@echo "docs/_build/index.html"

# Real models are those in the folder HOTKV_MODELS, if it is set.
evidence: setup
	@failed=0; for folder in evidence/DGR-007 evidence/shards evidence/route; do \
		$(BIN)/python evidence/record.py $$folder || failed=1; done; exit $$failed

format: setup
	@$(BIN)/ruff check --fix --exit-zero --quiet
	@$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(BUILD) dist docs/_build .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +
