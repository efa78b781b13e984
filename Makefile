# One command each, the same locally and in CI.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RAY_STAMP := $(VENV)/.installed-ray
PAGE_STAMP := $(VENV)/.installed-page
JOBS ?= auto
SEEDS ?= 1 2 3

.PHONY: run demo docs wheel test test-random test-cluster test-serve test-page test-all mutants guarantees check bench install lock help

help:            ## show the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

HOW_TO_CALL = @echo 'Call it as $(BIN)/dpcert, or as dpcert after: source $(BIN)/activate'

install: $(STAMP) ## make .venv and install what constraints.txt pins
	$(HOW_TO_CALL)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,fast,serve,docs]'
	touch $(STAMP)

run: $(STAMP)    ## train DP-Gaussian on MNIST at (3, 1e-5), certify 500 test images, write the report
	$(BIN)/dpcert run mnist/dp-gaussian --examples 500 --out runs/mnist-dp-gaussian
	$(HOW_TO_CALL)

demo: $(STAMP)   ## the product in under a minute: certify with a stored private model, predict one image, write a report
	@$(BIN)/python scripts/demo.py
	$(HOW_TO_CALL)

docs: $(STAMP)   ## the documentation as a site, in build/site; works offline, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'documentation: build/site/index.html'

wheel: $(STAMP)  ## the package as a wheel, in dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/dpcert-*.whl

test: $(STAMP)   ## the test suite (about 12 minutes on 2 cores)
	$(BIN)/python -m pytest -n $(JOBS) tests

test-random: $(STAMP) ## the test suite in three random orders (SEEDS="4 5" for others): no test may depend on another
	status=0; for seed in $(SEEDS); do \
	$(BIN)/python -m pytest -p randomly --randomly-seed=$$seed -n $(JOBS) tests || status=1; \
	done; exit $$status

$(RAY_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	touch $(RAY_STAMP)

test-cluster: $(RAY_STAMP) ## the tests of the executors, with a Ray cluster of three nodes on this machine; installs Ray (240 MB)
	$(BIN)/python -m pytest -n 0 -m "slow or not slow" tests/scale/test_cluster.py tests/scale/test_executors.py tests/scale/test_session.py tests/scale/test_tasks.py

test-serve: $(STAMP) ## the tests of the service, then 10,000 hostile requests and 10 minutes of load on loopback
	$(BIN)/python -m pytest -n 0 -m "slow or not slow" tests/serve
	$(BIN)/python -m tests.serve.load

$(PAGE_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[page]'
	touch $(PAGE_STAMP)

test-page: $(PAGE_STAMP) ## the page of dpcert serve in Chromium, and the demo that runs in it; installs Chromium and npm if it may
	@{ command -v chromium && command -v npm; } > /dev/null || apt-get install --yes --no-install-recommends chromium nodejs npm || \
	{ echo 'make test-page needs Chromium, Node.js and npm; install them first (Debian: apt-get install chromium nodejs npm)'; exit 2; }
	$(BIN)/python -m pytest -n 0 -r s -m "slow or not slow" tests/serve/page tests/serve/test_demo.py

test-all: $(STAMP) ## also the slow statistical and fault tests and the mutants; then writes docs/guarantees.md
	rm -f build/evidence.jsonl
	status=0; \
	$(BIN)/python -m pytest -n $(JOBS) -m "slow or not slow" tests || status=1; \
	$(BIN)/python -m tests.mutants.run || status=1; \
	$(BIN)/python -m tests.guarantees; \
	exit $$status

mutants: $(STAMP) ## hand-made faults of the critical files, each of which a named test must notice
	$(BIN)/python -m tests.mutants.run

guarantees: $(STAMP) ## docs/guarantees.md from what the last test-all wrote down
	$(BIN)/python -m tests.guarantees

check: $(STAMP)  ## lint, format, strict types, import rules
	$(BIN)/ruff check src tests benchmarks scripts examples
	$(BIN)/ruff format --check src tests benchmarks scripts examples
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/architecture

bench: $(STAMP)  ## the benchmarks, as JSON and tables in benchmarks/results
	$(BIN)/python -m benchmarks.training_step
	$(BIN)/python -m benchmarks.backbone_step
	$(BIN)/python -m benchmarks.certification
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.reading
	$(BIN)/python -m benchmarks.methods
	$(BIN)/python -m benchmarks.shards
	$(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m benchmarks.serve

lock: $(RAY_STAMP) ## write constraints.txt from what is installed
	$(BIN)/python -m pip freeze --exclude-editable | sed -e 's/+cpu//' | grep -v '^dpcert' > constraints.txt
