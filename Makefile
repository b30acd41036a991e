# make train   train the quickstart model on this machine (CONFIG=configs/x.yaml for another run)
# make test    run every test that this machine can run
# make test-fake-gpu   the tests marked gpu, on fake devices (part of make test)
# make test-fast   the tests that decide most changes, in about a minute
# make nightly the tests that take long, such as kills and restarts; then random runs of the engine
#              against a float64 oracle, random misuse, odd inputs, random sequences of overflows,
#              seeded bugs of CUDA code, and an hour of `make soak`
# make soak    random faults on two and three simulated hosts (SECONDS=240)
# make lint    formatting, lint, types and layers
# make size    code lines, modules, configuration keys, import cycles and words of the documentation
# make behaviour  what a change of structure must not change: API, help, messages, weights of short runs
# make dist    build sdist and wheel into dist/, check and test them (SOURCE_URL=https://... is the
#              repository for the links that a package index shows)
# make docs    build the documentation into build/docs, with warnings as errors
# make notebooks   write the notebooks of docs/labs from the scripts of examples/labs
# make bench   compare with other training loops, side by side, and name recorded results that are
#              older than the code (RECORD=1 replaces recorded results and tables)
# make bench-gpu   the tests marked gpu, and the benchmarks on a GPU, in slices of at most 9 minutes
#              (SLICE=1 for one of them)

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/quickstart.yaml
WORKERS ?= 4
CASES ?= 5000
SECONDS ?= 240
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.installed-docs

.PHONY: train test test-fake-gpu test-fast soak nightly lint size behaviour format docs notebooks dist bench bench-gpu clean

train: $(INSTALLED)
	$(VENV)/bin/distmp launch -- --config $(CONFIG)

# Ranks wait for each other most of the time, so more tests than cores run side by side. Bytecode is
# cached, whatever the environment says: thousands of ranks import the same modules.
TEST_ENV := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1

test: $(INSTALLED)
	$(TEST_ENV) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not nightly"
	$(MAKE) test-fake-gpu SCHEDULES=60 LEFT_OUT="real_gpu or nightly"

# Two workers, because these tests keep a core busy, unlike ranks that wait for each other. 60 orders
# of operations find every bug of tests/adversary/cuda_mutants.md. Other files are not even imported.
SCHEDULES ?= 200
LEFT_OUT ?= real_gpu
GPU_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)
test-fake-gpu: $(INSTALLED)
	FAKE_CUDA_SCHEDULES=$(SCHEDULES) $(TEST_ENV) $(VENV)/bin/python -m pytest -p tests.fake_cuda.plugin -n 2 --dist worksteal \
		-m "gpu and not ($(LEFT_OUT))" $(GPU_TESTS)

# The parts and the engine, without the tests marked slow; the trainer and the launcher start
# processes that take seconds each.
FAST := adversary/test_mutants.py buckets checkpoint/test_tidy.py checkpoint/test_loading.py \
	checkpoint/test_saving.py data diagnosis distributed/test_comparison.py \
	distributed/test_world.py docs/test_checks.py docs/test_troubleshooting.py \
	engine/test_engine.py engine/test_outcome.py engine/test_divergence_guard.py \
	engine/test_step_checks.py optim parallel/test_init.py parallel/test_replicated.py \
	parallel/test_settings.py precision scaling test_config.py test_errors.py \
	training/test_run_fingerprint.py utils

test-fast: $(INSTALLED)
	$(TEST_ENV) $(VENV)/bin/python -m pytest -n 3 --dist worksteal -m "not slow" \
		$(addprefix tests/,$(FAST))

soak: $(INSTALLED)
	for hosts in 2 3; do \
		$(TEST_ENV) $(VENV)/bin/python -m tests.soak --hosts $$hosts \
			--seconds $$(($(SECONDS) / 2)) || exit 1; \
	done

nightly: $(INSTALLED)
	$(TEST_ENV) $(VENV)/bin/python -m pytest -n 3 --dist worksteal -m nightly
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.adversary --cases $(CASES)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.adversary.misuse --cases $(CASES)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.adversary.inputs --cases $(CASES)
	SCALER_SEQUENCES=$(CASES) OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q \
		tests/scaling/test_grad_scaler_model.py
	$(VENV)/bin/python -m tests.adversary.cuda_mutants
	$(MAKE) test-fake-gpu
	$(MAKE) soak SECONDS=1800

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

size: $(INSTALLED)
	$(VENV)/bin/python .ci/size.py

behaviour: $(INSTALLED)
	@$(TEST_ENV) $(VENV)/bin/python .ci/behaviour.py

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(DOCS_INSTALLED)
	$(VENV)/bin/sphinx-build -W --keep-going -q -b html docs build/docs

notebooks: $(INSTALLED)
	$(VENV)/bin/python .ci/notebooks.py

dist: $(INSTALLED)
	rm -rf dist
	DISTMP_SOURCE_URL=$(SOURCE_URL) $(VENV)/bin/python -m build --no-isolation --outdir dist .
	$(VENV)/bin/python -m twine check --strict dist/*
	$(VENV)/bin/python -m pytest tests/test_package.py

bench: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks $(if $(RECORD),--record)

bench-gpu: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.gpu $(if $(SLICE),--slice $(SLICE))

# A stamp, so that the environment is prepared once and again when what it holds has changed.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "distmp needs Python 3.10 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
