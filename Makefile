# The two commands of the README. Each does all its set-up; both are fast the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS := $(VENV)/.installed-for-tests
DOCS := $(VENV)/.installed-for-docs
COMPILED := $(VENV)/.compiled
PIP := $(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt
# Else each process would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

# Overrides that are typed as variables of make, in quotes where they have spaces: make train model=qwen3_moe_laptop
# Words with quotes of their own, parentheses, semicolons or dollars go into ARGS, as do options.
SPACE := $() $()
WORDS = $(filter-out $(addsuffix =%,ARGS PYTHON VENV BIN TORCH),$(subst \$(SPACE),<space>,$(MAKEOVERRIDES)))
OVERRIDES = $(subst <space>,\$(SPACE),$(WORDS))

.PHONY: train test every quick night other-torch stub-gpu tools peer gpu gpu-wheels check lint types compiled slurm golden docs clean

## Train a small language model on this machine, draw its loss curve and let it write.
train: $(STAMP)
	$(BIN)/titan-exp train $(OVERRIDES) $(ARGS)
	$(BIN)/titan-exp generate prompt='def ' $(filter paths.runs=%,$(OVERRIDES))

# A test for every core, and one more: ranks wait for each other much of their time. Those that share a SLURM, and wait
# for it, stay together in one process.
WORKERS := $(shell cores=$$(nproc); echo $$((cores > 4 ? 5 : cores + 1)))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations 15

## Format, lint, types and every test. SLURM is installed beside the packages, types are checked beside the first tests.
test:
	$(MAKE) --jobs=2 slurm lint
	$(MAKE) --jobs=2 types every

every: compiled
	$(PYTEST) -m "slow or not slow"

## The tests without the minutes-long ones.
quick: $(TESTS) compiled
	$(PYTEST) -m "not slow"

## Every layout of tests/parity and other cases that the tests by day leave out, hundreds of layouts drawn at random, and
## things broken on purpose that must be noticed.
night: $(TESTS) peer compiled
	$(BIN)/pyright --pythonpath $(BIN)/python
	TITAN_EXP_TESTS_COLD=1 $(PYTEST) -m night
	$(PYTEST) tests/parity/*mutations.py tests/launch/*mutations.py tests/extensions/*/*mutations.py tests/parity/test_drawn.py --layouts 300
	$(MAKE) tools
	$(MAKE) docs

## The tests without the minutes-long ones on another torch, in an environment of its own: make other-torch TORCH=2.14
TORCH ?= 2.11
OTHER := .venv-torch-$(TORCH)
other-torch: $(OTHER)/.installed
	$(subst $(BIN),$(OTHER)/bin,$(PYTEST)) -m "not slow"

## Planned memory beside that of torch's own operators and allocator for CUDA, which needs gcc and no GPU.
stub-gpu: $(OTHER)/.installed
	$(OTHER)/bin/python -m benchmarks stub-memory $(ARGS)

# The interpreter of torch 2.11's Triton runs with NumPy before 2.4.
$(OTHER)/.installed: pyproject.toml
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet 'torch==$(TORCH).*' 'numpy<2.4' --editable '.[test]'
	touch $@

## torchtune and the lm-evaluation-harness opened on our exports, and on our models, in an environment of their own: they want older packages.
tools:
	test -x .venv-tools/bin/python || $(PYTHON) -m venv .venv-tools
	.venv-tools/bin/python -m pip install --quiet --constraint .ci/constraints.txt torch
	.venv-tools/bin/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[test]'
	.venv-tools/bin/python -m pip install --quiet torchtune==0.6.1 'torchao==0.15.*' 'lm-eval[hf]'
	OMP_NUM_THREADS=1 .venv-tools/bin/python -m pytest -m slow tests/checkpoint/test_other_tools.py tests/extensions/tasks/test_lm_eval.py

## torchtitan for `python -m benchmarks versus`, in a folder of its own: its needs are no needs of titan_exp.
peer: .peer/.installed

.peer/.installed: benchmarks/versus/requirements.txt
	rm -rf .peer
	$(PYTHON) -m pip install --quiet --no-deps --target .peer --requirement $<
	touch $@

GOLDEN = $(shell grep -rl "golden: " tests --include="test_*.py")

# The environment of make train where there is one, else the Python of the GPU machine.
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_SECONDS ?= 540

## On a machine with a GPU: tests by room, speed beside torchtitan, planned and measured memory, doctor, in one report.
gpu:
	$(GPU_PYTHON) -m benchmarks gpu-report --seconds $(GPU_SECONDS) $(ARGS)

## Wheels for a GPU machine without a network; GPU_PYTHON_VERSION is its Python's.
GPU_PYTHON_VERSION ?= 3.12
gpu-wheels:
	$(PYTHON) -m benchmarks gpu-wheels --python $(GPU_PYTHON_VERSION)

# Workers and the processes that they start find every module compiled: a collection imports all that tests import.
compiled: $(COMPILED)
	$(BIN)/python -m compileall -q titan_exp hydra_plugins

$(COMPILED): $(TESTS)
	$(BIN)/python -m pytest -qq --collect-only -p no:cacheprovider >$@.log || { cat $@.log; exit 1; }
	touch $@

check: lint types

lint: $(TESTS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Tests run, which shows most of their errors of types: pyright checks them by night.
types: $(TESTS)
	$(BIN)/pyright --pythonpath $(BIN)/python titan_exp hydra_plugins benchmarks

## A SLURM for tests/cluster, which skips without one.
slurm:
	.ci/slurm

## Write what is generated: comments and new keys of conf/, then the texts that follow from its options.
golden: $(TESTS)
	$(BIN)/python -m pytest -q tests/config/test_reference.py --update-golden
	$(BIN)/python -m pytest -q $(GOLDEN) --update-golden

## The site: open build/docs/index.html. A warning, such as a broken link, is an error.
docs: $(DOCS)
	$(BIN)/python -m sphinx --fresh-env --write-all -W --keep-going -n -q -c docs . build/docs
	@echo build/docs/index.html

define environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "titan_exp needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
endef

$(STAMP): pyproject.toml .ci/constraints.txt
	$(environment)
	$(PIP) torch
	$(PIP) --editable .
	touch $(STAMP)

# One call of pip, which compiles no module: those that tests import are compiled when they are first imported.
$(TESTS): pyproject.toml .ci/constraints.txt
	$(environment)
	$(PIP) --no-compile --editable '.[test]'
	touch $(STAMP) $(TESTS)

$(DOCS): $(STAMP)
	$(PIP) --editable '.[docs]'
	touch $(DOCS)

clean:
	rm -rf build/docs $(VENV) .venv-tools .venv-torch-* .peer .wheels .gpu-packages
