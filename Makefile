# Everything runs in .venv, which `make demo`, `make test` and the others create when they need it.
#   make demo DEMO_ARGS="--output runs/first"    passes flags to `bertlab demo`
#   make test TEST_ARGS="tests/data/test_packing.py"    passes arguments to pytest
#   make bench BENCH_ARGS="--plan"               passes flags to benchmarks/suite.py
#   make test-versions VERSIONS=newest           tests with today's versions in .venv-newest
#   make docs DOCS_ARGS="--train"                trains the model that lives in the pages, and puts it there
#   make demo PYTHON=/path/to/python3.12         chooses the Python of a new .venv

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-xla test-colab test-versions constraints bench docs sync check clean
SHELL := /bin/sh

BIN := .venv/bin
REQUIRED := pyproject.toml constraints.txt scripts/install.sh
VERSIONS := lowest
VERSIONS_PYTHON := $(if $(filter lowest,$(VERSIONS)),3.10,3.13)
# Else uv would rather take the newest fsspec than the lowest datasets.
VERSIONS_PINS := $(if $(filter lowest,$(VERSIONS)),$(shell sed -nE 's/^    "(datasets)>=([0-9.]+).*/\1==\2.*/p' pyproject.toml))
VERSIONS_TOOLS := accelerate hypothesis ipykernel packaging pytest pytest-timeout pytest-xdist scipy seqeval tensorboard
VERSIONS_TESTS := $(addprefix tests/,core data model optim train finetuning embeddings explorers cli course)

help: ## List what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: .venv/.run ## Train a small BERT on this machine, in minutes
	@$(BIN)/bertlab demo $(DEMO_ARGS)

test: .venv/.dev ## Run the tests, the notebooks among them; about ten minutes on two quiet CPU cores
	@$(BIN)/python -m pytest -m "not slow" $(TEST_ARGS)

test-all: .venv/.dev ## Run every test, the slow ones too (random kills, browser, wheel, site): what a change must pass
	@sh scripts/chromium.sh
	@$(MAKE) -s .venv-colab/.colab || echo "Without Colab's versions, the tests in its environment will be skipped"
	@$(BIN)/python -m pytest $(TEST_ARGS)

test-xla: .venv-xla/.xla ## Run the tests of XLA on its CPU device, in an environment of their own
	@PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest -n 0 tests/xla $(TEST_ARGS)

test-colab: .venv/.dev .venv-colab/.colab ## Run the index and the course with Colab's versions and kernel; needs uv
	@$(BIN)/python -m pytest -n 0 tests/house/test_colab.py $(TEST_ARGS)

test-versions: ## Run the core of the suite with the lowest versions (VERSIONS=newest: with today's); needs uv
	@uv venv --quiet --allow-existing --python $(VERSIONS_PYTHON) .venv-$(VERSIONS)
	@install() { uv pip install --quiet --python .venv-$(VERSIONS) --upgrade $(VERSIONS_PINS) \
		--resolution $(if $(filter lowest,$(VERSIONS)),lowest-direct,highest) --editable '.[adapters,optimizers]' "$$@"; }; \
		install --torch-backend auto 2>/dev/null || install # the second form brings CUDA's packages, about 5 GB
	@uv pip install --quiet --python .venv-$(VERSIONS) $(VERSIONS_TOOLS)
	@.venv-$(VERSIONS)/bin/python -m pytest -m "not slow" $(VERSIONS_TESTS) $(TEST_ARGS)

constraints: ## Write constraints.txt anew: today's versions for each supported Python; needs uv
	@uv pip compile --quiet --universal --python-version 3.10 --extra dev --no-annotate --no-header pyproject.toml \
		| grep -v -E '^(nvidia|cuda|triton)' >constraints.txt

bench: .venv/.dev ## Measure bertlab beside common alternatives; continues where it stopped
	@$(BIN)/python benchmarks/suite.py $(BENCH_ARGS)

docs: .venv/.docs ## Stage, check and (with Quarto) render the site into _docs
	@$(BIN)/python scripts/docs.py $(DOCS_ARGS)

sync: .venv/.docs ## Export and clean the notebooks; renew README, badges, links and sidebar
	@$(BIN)/python scripts/sync.py

check: .venv/.dev ## Lint, sync, and fail if that changed a committed file
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python scripts/sync.py
	@git diff --exit-code --stat

clean: ## Remove what was built; .venv and demo runs stay
	rm -rf _proc _docs dist build/lib build/bdist.* *.egg-info .pytest_cache .hypothesis nbs/nbdev.yml
	find bertlab tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each extra; it goes stale when the requirements change.
.venv/.run .venv/.docs .venv/.dev: $(REQUIRED)
	@PYTHON="$(PYTHON)" sh scripts/install.sh $(@F)

.venv-xla/.xla: pyproject.toml constraints.txt scripts/xla.sh
	@PYTHON="$(PYTHON)" sh scripts/xla.sh

.venv-colab/.colab: scripts/colab.txt scripts/colab.sh
	@sh scripts/colab.sh
