# Every target makes what it needs; `make` alone lists them.
SHELL := /bin/bash
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test test-next test-audit test-audit-gpu check nightly fuzz lint types imports tests docs lock
.PHONY: words screenshot clean bench observatory

PYTHON  ?= python3
# The CPU build by name: a plain index then finds nothing, rather than gigabytes of CUDA.
TORCH   ?= torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
# uv has its own index of CPU builds; a folder of wheels named for pip serves it too.
UV_TORCH = $(if $(PIP_FIND_LINKS),--find-links '$(PIP_FIND_LINKS)',--torch-backend cpu)
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 8))' 2>/dev/null || echo 1)
DEV     ?= .venv-dev
TPU     ?= .venv-tpu
GPU     ?= .venv-gpu
NEXT    ?= .venv-next
OBSERVATORY ?= $(HOME)/.cache/meshwright/observatory
ARGS    ?=
ROOM    ?=
UV      := $(shell command -v uv 2>/dev/null)
START   := $(shell date +%s)
SECONDS_SO_FAR = $$(( $$(date +%s) - $(START) ))

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1

help:
	@echo 'make demo      plan, train, audit and serve a small model on 8 virtual CPU devices (own .venv)'
	@echo 'make test      lint, types, import contracts and tests, in a fresh or current $(DEV)'
	@echo '          of one room, in seconds: make test ROOM=notation'
	@echo 'make check     the same in the environment that is there: make check DEV=.venv'
	@echo 'make words     constructions that are hard to read, by room; fails if there are more than before'
	@echo 'make test-audit  audits by the TPU compiler, which needs no TPU, in an environment of their own'
	@echo 'make test-audit-gpu  the same by the GPU compiler, which needs no GPU but a 5 GB download'
	@echo 'make test-next  the tests on the newest JAX and the newest Python here, in an environment of their own'
	@echo 'make nightly   make test, slow tests and their types too, on random examples; a share of the longest lists (SEED=all: all)'
	@echo 'make fuzz      generated requests and files, thousands of each, in half an hour; part of make nightly'
	@echo 'make bench     what users wait for, in some five minutes; fails if a row is 10% slower than recorded'
	@echo 'make observatory  twelve audits over the last three releases of JAX, by the compilers for TPUs and GPUs; environments and'
	@echo '          results go to OBSERVATORY=$(OBSERVATORY) (10 GB; needs uv), the table to docs/how-to/compare-releases.md'
	@echo 'make docs      the documentation as static files in build/site, with every link checked'
	@echo 'make lock      resolve requirements.lock and requirements-dev.lock anew (needs uv)'
	@echo 'make screenshot docs/report.png from REPORT=runs/demo/report.html (needs Chromium)'
	@echo 'make clean     remove environments and caches, keep runs/'
	@echo
	@echo 'PYTHON=$(PYTHON)  WORKERS=$(WORKERS)  DEV=$(DEV)  TORCH=$(TORCH)'
	@echo 'ARGS="..." goes to mw demo (make demo) or pytest (make check ARGS="-k wk tests/notation")'

demo: .venv/.installed
	@.venv/bin/mw demo $(ARGS)

test: $(DEV)/.installed
	@$(MAKE) --no-print-directory check

# Types and words take one thread and run next to the tests; their output is printed last. Types read every room,
# so ROOM=notation leaves them out.
check: lint imports
	@log=$$(mktemp); $(MAKE) --no-print-directory -k $(if $(ROOM),,types) words >$$log 2>&1 & texts=$$!; \
	  $(MAKE) --no-print-directory tests; tests=$$?; \
	  wait $$texts; texts=$$?; cat $$log; rm $$log; exit $$((texts | tests))
	@echo "all passed: lint,$(if $(ROOM),, types,) imports, words, tests$(ROOM:%= of %) in $(SECONDS_SO_FAR) s"

# One compile at a time: libtpu runs once on a host.
test-audit: $(TPU)/.installed
	@echo '== pytest, by the TPU compiler' && $(TPU)/bin/pytest -q tests/audit/test_tpu.py --durations=0 $(ARGS)
	@echo "all passed: audits by the TPU compiler in $(SECONDS_SO_FAR) s"

test-audit-gpu: $(GPU)/.installed
	@echo '== pytest, by the GPU compiler' && $(GPU)/bin/pytest -q tests/audit/test_gpu.py --durations=0 $(ARGS)
	@echo "all passed: audits by the GPU compiler in $(SECONDS_SO_FAR) s"

# The newest Python on PATH or of pyenv, unless one is named: a new JAX drops the oldest that the last one took.
newest = $(if $(filter file,$(origin PYTHON)),$(shell for minor in {19..12}; do \
  for one in python3.$$minor ~/.pyenv/versions/3.$$minor.*/bin/python3.$$minor; do \
  $$one -c '' 2>/dev/null && echo $$one && exit; done; done; echo $(PYTHON)),$(PYTHON))

test-next:
	@$(MAKE) --no-print-directory $(NEXT)/.installed PYTHON="$(newest)"
	@$(call install,$(NEXT)) --upgrade jax jaxlib
	@$(NEXT)/bin/python -c 'import jax, platform; \
	  print(f"== jax {jax.__version__} on Python {platform.python_version()}")'
	@$(call tests,$(NEXT))

# Of the longest lists of slow tests a share, another each day. A night is run again by its SEED.
TODAY := $(shell date +%Y%m%d)
SEED ?= $(TODAY)
nightly: $(DEV)/.installed
	@echo "== slow tests that are sampled: of SEED=$(SEED)"
	@HYPOTHESIS_PROFILE=random NIGHTLY_SEED=$(SEED) $(MAKE) --no-print-directory check SELECT= TYPED=
	@$(MAKE) --no-print-directory fuzz

# Each kind of input has its limits of time and memory in its test; a failing example is printed, and kept in .hypothesis.
FUZZ_EXAMPLES ?= 1500
FUZZ_TESTS = tests/security/test_http_fuzz.py tests/security/test_file_fuzz.py tests/security/test_fuzz.py
fuzz: $(DEV)/.installed
	@echo '== fuzz, $(FUZZ_EXAMPLES) examples of each kind'
	@HYPOTHESIS_PROFILE=random FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) timeout 1800 $(DEV)/bin/pytest -q -o faulthandler_timeout=0 \
	  -n $(WORKERS) --dist load $(FUZZ_TESTS) $(ARGS)

bench: $(DEV)/.installed
	@$(DEV)/bin/python benchmarks/quick.py $(ARGS)

# The newest JAX needs a newer Python than the oldest that is supported.
observatory: $(DEV)/.installed
	@$(DEV)/bin/python benchmarks/observatory.py --folder '$(OBSERVATORY)' --python "$(newest)" $(ARGS)

docs: $(DEV)/.installed
	@echo '== mkdocs' && NO_MKDOCS_2_WARNING=1 $(DEV)/bin/mkdocs build --quiet --strict $(ARGS) && echo 'wrote build/site'

words:
	@echo '== words' && $(DEV)/bin/python tools/words.py

lint:
	@echo '== ruff check, ruff format' && $(DEV)/bin/ruff check --quiet . && $(DEV)/bin/ruff format --check --quiet .

# The types of tests take as long again, and are part of make nightly (TYPED=: all that pyproject.toml includes).
TYPED ?= src
types:
	@echo '== basedpyright $(TYPED)' && $(DEV)/bin/basedpyright --pythonpath $(DEV)/bin/python $(TYPED)

imports:
	@echo '== import contracts' && $(DEV)/bin/lint-imports --no-cache --no-logo

SELECT ?= -m "not slow"
tests:
	@$(call tests,$(DEV))

# $(call tests,ENV): the tests in a virtual environment.
tests = echo '== pytest, $(WORKERS) workers' && \
  $(1)/bin/pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(SELECT) $(ARGS) $(ROOM:%=tests/%)

.venv/.installed: requirements.lock pyproject.toml
	@$(call environment,.venv,requirements.lock)
	@touch $@ && echo "installed in $(SECONDS_SO_FAR) s"

$(DEV)/.installed: requirements-dev.lock pyproject.toml
	@$(call environment,$(DEV),requirements-dev.lock)
	@$(call install,$(DEV)) -c requirements-dev.lock $(if $(UV),$(UV_TORCH)) '$(TORCH)' \
	  || echo 'note: no $(TORCH) to be found; the tests against Hugging Face on torch will be skipped'
	@touch $@ && echo "installed in $(SECONDS_SO_FAR) s"

$(TPU)/.installed: requirements-dev.lock pyproject.toml
	@$(call environment,$(TPU),requirements-dev.lock)
	@$(call install,$(TPU)) -c requirements-dev.lock 'jax[tpu]'
	@$(TPU)/bin/python -c 'import libtpu'
	@touch $@ && echo "installed in $(SECONDS_SO_FAR) s"

$(GPU)/.installed: requirements-dev.lock pyproject.toml
	@$(call environment,$(GPU),requirements-dev.lock)
	@$(call install,$(GPU)) -c requirements-dev.lock 'jax[cuda12]'
	@$(GPU)/bin/python -c 'import jax_cuda12_plugin'
	@touch $@ && echo "installed in $(SECONDS_SO_FAR) s"

$(NEXT)/.installed: requirements-dev.lock pyproject.toml
	@$(call environment,$(NEXT),requirements-dev.lock)
	@touch $@ && echo "installed in $(SECONDS_SO_FAR) s"

# $(call install,ENV): the installer's command line up to the requirements.
install = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,$(1)/bin/python -m pip install --quiet)

# $(call environment,ENV,LOCK): a virtual environment with exactly the locked packages, and meshwright editable.
define environment
set -e; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
  echo "meshwright needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make $(MAKECMDGOALS) PYTHON=python3.12"; \
  exit 2; }; \
echo 'installing $(2) into $(1) with $(if $(UV),uv,pip) (a minute or two the first time)'; \
$(if $(UV),$(UV) venv --quiet --allow-existing --python "$$(command -v $(PYTHON))" $(1),$(PYTHON) -m venv $(1)) || { \
  echo 'cannot create $(1): on Debian and Ubuntu install python3-venv, or put uv on PATH'; exit 2; }; \
$(call install,$(1)) -r $(2); \
$(call install,$(1)) --no-deps --editable .
endef

lock:
	@test -n '$(UV)' || { echo 'make lock needs uv on PATH'; exit 2; }
	@$(call compile,requirements.lock) --extra demo
	@$(call compile,requirements-dev.lock) --extra dev

# Every platform and every Python from 3.11 on in one file; without the index it came from.
compile = $(UV) pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-emit-find-links \
  --no-annotate --custom-compile-command 'make lock' --output-file $(1) pyproject.toml

REPORT ?= runs/demo/report.html
CHROMIUM ?= $(firstword $(shell command -v chromium chromium-browser google-chrome 2>/dev/null))
screenshot:
	@test -n '$(CHROMIUM)' || { echo 'make screenshot needs Chromium: make screenshot CHROMIUM=path'; exit 2; }
	@profile=$$(mktemp -d); $(CHROMIUM) --headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars \
	  --disable-background-networking --disable-component-update --disable-sync --user-data-dir="$$profile" \
	  --window-size=1280,1100 --screenshot=docs/report.png "file://$(abspath $(REPORT))" 2>/dev/null; \
	  rm -rf "$$profile"; test -f docs/report.png && echo 'wrote docs/report.png'

clean:
	rm -rf .venv .venv-dev .venv-tpu .venv-gpu .venv-next .pytest_cache .hypothesis .ruff_cache .import_linter_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
