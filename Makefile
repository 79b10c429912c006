# Everything runs in .venv, which `make demo`, `make test` and the others create when they need it.
#   make demo DEMO_ARGS="--output runs/first"    passes flags to `bertlab demo`
#   make test TEST_ARGS="tests/test_house.py"    passes arguments to pytest
#   make bench BENCH_ARGS="--plan"               passes flags to benchmarks/suite.py
#   make test-versions VERSIONS=newest VERSIONS_ARGS="--cpu"    passes flags to scripts/versions.py
#   make docs DOCS_ARGS="--train"                trains the model that lives in the pages, and puts it there
#   make demo PYTHON=/path/to/python3.12         chooses the Python of a new .venv

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-xla test-versions bench docs sync check clean
SHELL := /bin/sh

BIN := .venv/bin
REQUIRED := pyproject.toml constraints.txt scripts/install.sh

help: ## List what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: .venv/.run ## Train a small BERT on this machine, in minutes
	@$(BIN)/bertlab demo $(DEMO_ARGS)

test: .venv/.dev ## Run the tests, the notebooks among them; about ten minutes on two quiet CPU cores
	@$(BIN)/python -m pytest -m "not slow" $(TEST_ARGS)

test-all: .venv/.dev ## Run every test, the slow ones too (random kills, browser, wheel, site): what a change must pass
	@sh scripts/chromium.sh
	@$(BIN)/python -m pytest $(TEST_ARGS)

test-xla: .venv-xla/.xla ## Run the tests of XLA on its CPU device, in an environment of their own
	@PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest -n 0 tests/xla $(TEST_ARGS)

test-versions: .venv/.dev ## Run the core of the suite with the lowest versions (VERSIONS=newest: with today's)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/python scripts/versions.py $(or $(VERSIONS),lowest) $(VERSIONS_ARGS)

bench: .venv/.dev ## Measure bertlab beside common alternatives; continues where it stopped
	@$(BIN)/python benchmarks/suite.py $(BENCH_ARGS)

docs: .venv/.docs ## Stage, check and (with Quarto) render the site into _docs
	@$(BIN)/python scripts/docs.py $(DOCS_ARGS)

sync: .venv/.docs ## Export and clean the notebooks; renew README, badges, links and sidebar
	@$(BIN)/python scripts/sync.py

check: .venv/.dev ## Lint, and fail if `make sync` would change anything
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/python scripts/sync.py --check

clean: ## Remove what was built; .venv and demo runs stay
	rm -rf _proc _docs dist build/lib build/bdist.* *.egg-info .pytest_cache .hypothesis nbs/nbdev.yml
	find bertlab tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each extra; it goes stale when the requirements change.
.venv/.run .venv/.docs .venv/.dev: $(REQUIRED)
	@PYTHON="$(PYTHON)" sh scripts/install.sh $(@F)

.venv-xla/.xla: pyproject.toml constraints.txt scripts/xla.sh
	@PYTHON="$(PYTHON)" sh scripts/xla.sh
