# Every target says what it does; `make` alone lists them. All set-up happens by itself, in .venv,
# and is skipped when nothing changed.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
MODEL ?= examples/tiny-vlm/model
# Compiled modules are kept: without them each process that tests start compiles torch anew.
export PYTHONDONTWRITEBYTECODE :=
KERNELS := $(wildcard runtime/src/foveal_runtime/model/cpu/kernels/*.[ch])

.PHONY: help
help:
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# --- set-up ------------------------------------------------------------------------------------
$(VENV)/.uv: requirements/uv.txt
	@echo "set-up 1/3: a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Foveal needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $@

$(VENV)/.run: $(VENV)/.uv requirements/run.txt runtime/pyproject.toml runtime/setup.py operator/pyproject.toml $(KERNELS)
	@echo "set-up 2/3: run-time packages (torch and its libraries are about 3 GB; minutes the first time)"
	@$(UV) pip install --python $(PY) --require-hashes -r requirements/run.txt
	@echo "set-up 3/3: Foveal itself, with its C kernels"
	@$(UV) pip install --python $(PY) --quiet --no-deps --no-build-isolation -e ./runtime -e ./operator
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt
	@echo "set-up: packages for tests and checks"
	@$(UV) pip install --python $(PY) --require-hashes -r requirements/dev.txt
	@touch $@

.PHONY: setup lock
setup: $(VENV)/.dev ## everything the other targets need
lock: $(VENV)/.uv ## compile requirements/*.in to hash-pinned *.txt
	@cd requirements && for n in uv build run operator torch runtime dev clients agents checkov release; do \
	  c=""; [ $$n = dev ] && c="-c run.txt"; \
	  p=--universal; [ $$n = agents ] && p="--python-platform linux"; \
	  ../$(UV) pip compile --quiet --generate-hashes --no-emit-index-url $$p \
	    --python-version 3.11 --custom-compile-command 'make lock' $$n.in $$c -o $$n.txt; done

# --- the main job ------------------------------------------------------------------------------
.PHONY: demo serve
demo: $(VENV)/.run ## serve the bundled model, ask it about images twice, show what the caches saved
	@$(PY) examples/demo.py
serve: $(VENV)/.run ## keep serving the bundled model on http://127.0.0.1:8000 (MODEL=dir for another)
	@$(VENV)/bin/foveal-runtime serve $(MODEL) --name tiny-vlm --idle-check-seconds 30

# --- tests -------------------------------------------------------------------------------------
.PHONY: check test test-extended test-all docs generate sizing control-plane goals clients coverage chart faults hostile fresh cluster e2e bench bench-check bench-peers soak release
check: $(VENV)/.dev ## ruff, mypy --strict, import contracts
	@$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

# Two workers; tests of a file, and all of tests/processes, share one, and so their started servers.
WORKERS ?= 2
LOCAL := not slow and not faults and not hostile and not api_server and not cluster
SHARED := -n $(WORKERS) --dist loadscope --no-loadscope-reorder
RUN_TESTS := OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q $(SHARED)

test: $(VENV)/.dev ## the tests that run for every change (no GPU, no cluster, no root; minutes)
	@$(RUN_TESTS) -m "$(LOCAL) and not extended"

test-extended: $(VENV)/.dev ## what test-all has beyond test: more deployments, more variants
	@$(RUN_TESTS) -m "$(LOCAL) and extended"

test-all: test test-extended ## every test that needs no root, no API server and no hour

docs: $(VENV)/.dev ## links of every page; shell blocks marked as runnable, with what they must print (minutes)
	@OMP_WAIT_POLICY=passive timeout 1800 $(VENV)/bin/pytest -q tests/contract/test_docs_links.py tests/contract/test_docs_blocks.py

control-plane: $(VENV)/.dev ## schema, objects and operator against a real API server (builds it once: 15 to 25 minutes)
	@e2e/cluster/build.sh
	@(e2e/tools/build.sh helm3 argo-cd && e2e/tools/crds.sh argo) || echo "not built: tests of Argo CD are skipped"
	@timeout 2400 $(VENV)/bin/pytest -q $(SHARED) -m "api_server and not slow" tests/control_plane/api_server

goals: $(VENV)/.dev ## what a resource costs the operator, with 100 of them, beside each goal (five minutes)
	@e2e/cluster/build.sh
	@PYTHONPATH=.:runtime/src:operator/src timeout 900 $(PY) -m e2e.soak.operator_scale --num 100 --rest-seconds 30 --single 30

$(VENV)/clients/.done $(VENV)/agents/.done: $(VENV)/%/.done: $(VENV)/.uv requirements/%.txt
	@$(PYTHON) -m venv $(VENV)/$*
	@$(UV) pip install --quiet --python $(VENV)/$*/bin/python --require-hashes -r requirements/$*.txt
	@touch $@
clients: $(VENV)/.dev $(VENV)/clients/.done $(VENV)/agents/.done ## other projects' clients and agents, unmodified, against real processes (minutes)
	@OMP_WAIT_POLICY=passive FOVEAL_LLM_D=1 timeout 1200 $(VENV)/bin/pytest -q \
	  tests/processes/test_foreign_clients.py tests/processes/test_agents.py \
	  tests/data_plane/engine/test_dynamo_indexer.py tests/data_plane/engine/test_llm_d_decoder.py

coverage: $(VENV)/.dev ## lines of operator/ that tests without a cluster run; less than 90 % fails (minutes)
	@OMP_WAIT_POLICY=passive timeout 1800 $(VENV)/bin/coverage run --source=operator/src -m pytest -q \
	  -m "not slow and not api_server" tests/control_plane
	@$(VENV)/bin/coverage report --skip-covered --sort=cover --fail-under=90

FAULTS ?= 20
faults: $(VENV)/.dev ## kill, pause or cut off a real process under load, 20 times (FAULTS=n; minutes)
	@OMP_WAIT_POLICY=passive FOVEAL_FAULTS=$(FAULTS) timeout 1800 $(VENV)/bin/pytest -q -s -m faults tests/processes

hostile: $(VENV)/.dev ## attack real processes under a load whose answers are checked; FOVEAL_HOSTILE=1000 cases of each kind
	@OMP_WAIT_POLICY=passive timeout 1800 $(VENV)/bin/pytest -q -s -m hostile tests/processes

cluster: $(VENV)/.dev ## image, chart and resource on a real node of this machine (root; 34 GiB of disk the first time)
	@e2e/cluster/run.sh

e2e: cluster faults ## everything on real processes: a cluster of one node, then processes under faults

bench: $(VENV)/.dev ## micro benches, then a short paired run against the servers installed (minutes)
	@for part in media workers mirror blocks scheduler grammars constrained_step attention recurrent step; do \
	  echo "--- $$part"; $(PY) -m e2e.bench.micro.$$part || exit 1; done
	@$(PY) -m e2e.bench --quick

bench-check: $(VENV)/.dev ## the bench's short form with and without caches: fails on a wrong answer, never on time
	@$(PY) -m e2e.bench --quick --servers foveal,foveal-no-caches,foveal-4x2 --rounds 1 --label check

bench-peers: $(VENV)/.dev ## install what to compare with, outside the tree: vLLM's CPU build, 6 GB
	@$(PY) -m e2e.bench.peers

soak: $(VENV)/.dev ## 100 faults, a million fuzz steps, the large checker instances (about an hour)
	@e2e/cluster/build.sh
	@$(PY) e2e/soak/mirror_check.py --seconds 120
	@$(PY) e2e/soak/mirror_fuzz.py --steps 1000000
	@OMP_WAIT_POLICY=passive FOVEAL_FAULTS=100 FOVEAL_OUTAGE_SECONDS=300 $(VENV)/bin/pytest -q -s -m "(faults or slow) and not cluster and not hostile" tests
	@FOVEAL_HOSTILE=10000 timeout 7200 $(VENV)/bin/pytest -q -s -m hostile tests/processes
	@FOVEAL_REAL_WEIGHTS=500 $(VENV)/bin/pytest -q tests/model/test_real_weights.py
	@OMP_WAIT_POLICY=passive FOVEAL_JSON_KILLS=100 $(VENV)/bin/pytest -q -k bound_stream tests/processes/test_structured_outputs.py
	@FOVEAL_OUTAGE_SECONDS=300 FOVEAL_ABSENCE_SECONDS=600 $(VENV)/bin/pytest -q -s -k "outage_is_survived or without_an_operator" -m "api_server and not slow" tests/control_plane/api_server
	@$(PY) -m e2e.soak.leak --minutes 60
	@FOVEAL_CLUSTER=full e2e/cluster/run.sh
	@PYTHONPATH=.:runtime/src:operator/src $(PY) -m e2e.soak.operator_scale --num 1000 --rest-seconds 600 --single 100

chart: $(VENV)/.dev ## the chart checked by Helm 3 and 4, helm-unittest, kubeconform, kube-score, checkov (builds them once)
	@e2e/chart.sh

generate: $(VENV)/.dev ## rewrite what is generated and committed: CRD and its page, golden objects, chart, dashboards
	@PYTHONPATH=.:runtime/src:operator/src $(PY) -m tests.support.regenerate
	@PYTHONPATH=. $(PY) -m tests.support.metrics_page docs/reference/metrics.md
	@PYTHONPATH=.:runtime/src $(PY) -m tests.support.model_table docs/reference/models.md
	@PYTHONPATH=.:runtime/src $(PY) -m tests.support.refused_page docs/reference/refused.md
	@PYTHONPATH=. $(PY) -m tests.support.values_table docs/reference/chart-values.md

release: $(VENV)/.dev ## wheels, sdists and the packaged chart in dist/, checked in an empty environment (minutes)
	@e2e/release.sh

sizing: $(VENV)/.dev ## profiles of published models from their configuration alone, and the sizing page (minutes)
	@PYTHONPATH=. $(PY) -m tests.support.sizing

fresh: ## clone HEAD into an empty folder and run README's two commands there, with their times
	@e2e/fresh.sh
