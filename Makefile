# Verbs only: each target is one call. `make help` lists them.
PYTHON ?= python3
VENV := .venv
GRAFT := $(VENV)/bin/graft
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PARALLEL := --numprocesses logical
OPTIONS = $(if $(PROFILE),--profile '$(PROFILE)') $(if $(MODEL),--model '$(MODEL)')

.DEFAULT_GOAL := help
.PHONY: help fetch bundle up down logs status watch doctor report ask verify bench soak compare reconcile render plan explain profiles models fixes pins lock upgrade rollback images install install-dev check test drill generated clean

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: install ## Start the service and ask it a question (PROFILE=rtx4090 MODEL=... MONITORING=1 ARGS=...)
	@$(GRAFT) up $(OPTIONS) $(if $(filter-out 0,$(MONITORING)),--monitoring) $(ARGS)

down: install ## Stop the service
	@$(GRAFT) down $(OPTIONS) $(ARGS)

logs: install ## Show the service's log (ARGS=--follow)
	@$(GRAFT) logs $(OPTIONS) $(ARGS)

status: install ## Say what runs, and whether it is healthy
	@$(GRAFT) status $(OPTIONS) $(ARGS)

watch: install ## Follow what keeps the service running: starts, ends, strikes, smaller settings
	@$(GRAFT) watch $(if $(PROFILE),--profile '$(PROFILE)') $(ARGS)

doctor: install ## Check this machine and the service, with one remedy for each thing that is wrong
	@$(GRAFT) doctor $(OPTIONS) $(ARGS)

report: install ## Write one file to paste into an issue, without secrets and names
	@$(GRAFT) report $(if $(PROFILE),--profile '$(PROFILE)') $(ARGS)

ask: install ## Ask the running model: make ask Q="What is the capital of France?"
	@$(GRAFT) ask $(OPTIONS) $(ARGS) -- "$$Q"

verify: install ## Check tool calls, prefix cache and context of the running service (ARGS=--quick)
	@$(GRAFT) verify $(if $(PROFILE),--profile '$(PROFILE)') $(ARGS)

bench: install ## Measure the running service: one stream, sixteen at a time, a sweep (ARGS="--load single")
	@$(GRAFT) bench $(if $(PROFILE),--profile '$(PROFILE)') $(ARGS)

soak: install ## Keep the running service under a mixed load (DURATION=72h ARGS=--resume)
	@$(GRAFT) soak $(if $(PROFILE),--profile '$(PROFILE)') $(if $(DURATION),--duration '$(DURATION)') $(ARGS)

compare: install ## Two reports of bench or soak as ratios: make compare A=old.json B=new.json
	@$(GRAFT) compare $(ARGS) -- '$(A)' '$(B)'

reconcile: install ## Two engines layer by layer: make reconcile A=transformers:DIR B='vllm:DIR?kv_cache_dtype=fp8'
	@$(GRAFT) reconcile $(if $(PROMPTS),--prompts '$(PROMPTS)') $(ARGS) -- '$(A)' '$(B)'

fetch: install ## Bring a model's files and verify them (MODEL=... ARGS="--from FOLDER")
	@$(GRAFT) fetch $(if $(PROFILE),--profile '$(PROFILE)') $(ARGS) -- $(MODEL)

bundle: install ## Carry a service to a machine without network: make bundle OUT=FOLDER PROFILE=...
	@$(GRAFT) bundle $(OPTIONS) $(ARGS) -- $(if $(OUT),'$(OUT)')

render: install ## Write the compose file and all that goes with it, start nothing
	@$(GRAFT) render $(OPTIONS) $(ARGS)

plan: install ## Say what fits: memory, context, flags, problems
	@$(GRAFT) plan $(OPTIONS) $(ARGS)

explain: install ## Every vLLM flag with its value, reason and source
	@$(GRAFT) explain $(OPTIONS) $(ARGS)

profiles: install ## List the profiles, and which of them this machine can run
	@$(GRAFT) profiles $(ARGS)

models: install ## List the models, and what context each has on which card
	@$(GRAFT) models $(ARGS)

fixes: install ## List the fixes for vLLM
	@$(GRAFT) fixes $(ARGS)

pins: install ## Show the pinned vLLM images and their digests (ARGS=resolve, ARGS=check)
	@$(GRAFT) pins $(ARGS)

lock: install ## Write down the bytes that a start is made of; ARGS=--locked holds `up` to them
	@$(GRAFT) lock $(OPTIONS) $(ARGS)

upgrade: install ## Move the running service to the current vLLM release (ARGS=--check says what would change)
	@$(GRAFT) upgrade $(OPTIONS) $(ARGS)

rollback: install ## Start again what ran before the last upgrade
	@$(GRAFT) rollback $(if $(PROFILE),--profile '$(PROFILE)') $(ARGS)

images: install ## Build the image of each pinned release with docker buildx bake (ARGS=vllm-0_33_0)
	@$(GRAFT) pins context build/images
	docker buildx bake --file images/docker-bake.hcl $(ARGS)

install: $(VENV)/.installed

$(VENV)/.installed: requirements/launcher.txt pyproject.toml patches/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "graft: $(PYTHON) is %d.%d; Python 3.11 or newer is needed (make PYTHON=python3.12 ...)" % sys.version_info[:2])'
	@echo "graft: installing the launcher into $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "graft: no venv module; on Debian and Ubuntu: sudo apt-get install python3-venv" >&2; exit 2; }
	@$(PIP) install --quiet --require-hashes -r requirements/launcher.txt
	@$(PIP) install --quiet --no-deps --editable . --editable patches
	@touch $@

install-dev: $(VENV)/.installed-dev

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	@$(PIP) install --quiet --require-hashes -r requirements/dev.txt
	@touch $@

check: install-dev ## Lint, types and the fast tests
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest $(PARALLEL) --dist worksteal tests/launcher

test: install-dev ## All tests that this machine can run; the others skip by name
	$(GRAFT) engine install engine
	$(GRAFT) engine install vllm-0.33
	@$(MAKE) --no-print-directory check
	$(VENV)/bin/python -m pytest $(PARALLEL) --dist loadfile tests/patches tests/kernels
	$(VENV)/bin/python -m pytest tests/monitoring tests/gateway tests/engine tests/compose

drill: install-dev ## Drill gateway and watchdog at length: parts killed, attacks, 200 streams, memory (needs haproxy)
	$(GRAFT) engine install engine
	$(VENV)/bin/python -m tests.gateway.drill --out tests/gateway/results/drill.json
	GRAFT_DRILL_RESULTS=tests/engine/results $(VENV)/bin/python -m pytest \
		tests/engine/test_fault_drills.py tests/engine/long_drills.py

generated: install-dev ## Write again what follows from the code: schemas, golden files, README's tables
	@$(GRAFT) schema profile > profiles/schema/profile.schema.json
	@$(GRAFT) schema model > profiles/schema/model.schema.json
	$(VENV)/bin/python -m tests.launcher.golden
	$(VENV)/bin/python -m tests.launcher.readme

clean: ## Remove the environments and caches; services' state in .graft stays
	rm -rf .venv .venv-engine .venv-vllm-0.33 .mypy_cache .ruff_cache .pytest_cache .hypothesis
