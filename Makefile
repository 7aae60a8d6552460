# Every target that needs Python makes .venv by itself; a second call finds it ready.
# Variables: PYTHON (3.11 or newer), TORCH (which build of torch), TRITON (which Triton), ARGS (passed on to the command),
# WORKERS (how many processes run tests; 0: this one; 3 keep two cores busy, since some tests wait for processes),
# BUDGET (--budget tests/budget.txt fails a run of `make test` that takes more processor time than is allowed),
# MINUTES (how long `make soak` goes on).

PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
ARGS ?=
WORKERS ?= 3
MINUTES ?= 30

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.installed
WIRE := protos/released.yaml
SPREAD := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 1
BUDGET ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python scripts/run_tests.py

.DEFAULT_GOAL := help
.PHONY: help install demo chat test test-all test-extended test-triton test-gpu test-browser test-slow soak coverage check format proto reference release-wire bench clients lock clean

help: ## Show this text
	@echo "Longleaf: exact generation over contexts that no single GPU can hold."
	@echo
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22
	@echo
	@echo "Start with:  make demo                        (ARGS=\"--tokens 8000 --world-size 2\" for a smaller one)"
	@echo "On a CPU machine, a smaller torch:"
	@echo "  make demo TORCH=\"torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu\""

install: $(READY) ## Make .venv, and install all there
	@echo "now: source $(BIN)/activate"

demo: $(READY) ## Start a fleet, ingest a long document, ask it, check the answers
	@$(BIN)/longleaf demo $(ARGS)

# Tests start hundreds of processes: where no bytecode may be written, each of them compiles all modules again.
test test-extended test-slow coverage: export PYTHONDONTWRITEBYTECODE :=

chat: $(READY) ## Ask a small chat model about the README (ARGS=--yes: download it, 93 MB, without asking)
	@$(BIN)/python examples/smollm2.py $(ARGS)

test: $(READY) ## Run the tests (ARGS="-k merge" for some of them)
	$(PYTEST) $(BUDGET) -- $(SPREAD) $(ARGS)

test-all: test test-extended test-triton ## Run all tests that CI runs

test-extended: $(READY) ## Run the extended tests: further cases, all ways of using Ray, longer runs
	$(PYTEST) -- -m 'extended and not slow and not bench' $(SPREAD) $(ARGS)

test-triton: $(VENV)/.triton ## Run the kernels of GPUs in Triton's interpreter
	TRITON_INTERPRET=1 $(PYTEST) -- tests/triton $(SPREAD) $(ARGS)

test-gpu: ## Run the kernels of GPUs on a GPU, with PYTHON as it is: it needs torch and Triton, and nothing is installed
	@$(PYTHON) -m tests.gpu

test-browser: $(VENV)/.browser ## Run the tests of the page in Chromium; where that lacks, apt-get installs it
	REQUIRE_TOOLS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/e2e/browser $(ARGS)

test-slow: $(READY) ## Run the slow tests (hours): full products, tens of thousands of schedules, the benches
	HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest -m 'slow or bench' -o faulthandler_timeout=0 $(ARGS)

soak: $(READY) ## Hurt services under load in every known way for MINUTES=30; a failure prints the line that repeats it
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) $(ARGS)

coverage: $(READY) ## Run the tests, and list the lines and branches that they do not reach
	$(BIN)/coverage erase
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest $(SPREAD) $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

check: $(READY) ## Lint, type check, check the layers, the language, generated files and the compatibility of the wire
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/python scripts/generate_reference.py --check
	$(BIN)/python scripts/check_language.py
	$(BIN)/buf breaking protos --against $(WIRE)
	$(BIN)/pyright

format: $(READY) ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: reference ## Generate longleaf/v1 and docs/messages.md from protos/
	$(BIN)/python scripts/generate_stubs.py

reference: $(READY) ## Generate docs/messages.md from protos/, and docs/configuration.md from the settings
	$(BIN)/python scripts/generate_reference.py

release-wire: $(READY) ## Promise the wire as protos/ has it now; refused where it breaks what was promised before
	$(BIN)/buf breaking protos --against $(WIRE)
	$(BIN)/buf build protos --as-file-descriptor-set --exclude-source-info -o $(WIRE)

bench: $(READY) ## Measure against transformers and write bench/results
	$(BIN)/python -m bench.report $(ARGS)

clients: $(READY) ## Install clients of the gateway for HTTP that slow tests try
	$(PIP) install -e '.[clients]'

lock: $(READY) ## Write requirements.lock from what .venv holds now
	$(BIN)/python scripts/lock.py

clean: ## Remove caches and builds (.venv stays)
	rm -rf build dist .coverage* .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

# torch comes first and alone: its build depends on the machine, and nothing after it may replace it.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Longleaf needs Python 3.11 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 || true)" >&2; \
	  echo "       name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	@touch $@

$(READY): $(VENV)/.torch pyproject.toml requirements.lock
	$(PIP) install -c requirements.lock -e '.[dev]'
	@touch $@

# Playwright downloads no browser: the system's is used
$(VENV)/.browser: $(READY)
	command -v chromium || apt-get install --yes --no-install-recommends chromium
	$(PIP) install -c requirements.lock -e '.[browser]'
	@touch $@

# alone, since Triton for a torch without GPUs is nothing that torch asks for
$(VENV)/.triton: $(READY)
	$(PIP) install --no-deps $(TRITON)
	@touch $@
