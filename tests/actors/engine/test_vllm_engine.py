"""The vLLM engine against a Hugging Face forward pass: log-probabilities, versions, and refreshes in mid-generation."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from transformers import Qwen3Config

from slipstream.actors.engine import vllm_engine, vllm_start
from slipstream.actors.engine.engine import EngineDied
from slipstream.actors.engine.orders import EngineSettings
from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
from slipstream.actors.weights.refused import WeightsRefused, WeightsUnfit
from slipstream.common.config.config import load_config
from slipstream.common.records.trajectory import Sampling
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.common.transfer.model_folder import SHAPES
from slipstream.envhub.catalogue import make_any_env
from tests.actors.episode.episodes import ALLOWANCE, rollout_of
from tests.actors.forward_pass import TOLERANCE, forward_logprobs, worst
from tests.actors.generations import check_completion, check_crossing, check_serves, committed, crossings_of, deaths_of
from tests.actors.vllm_engines import LONG, MAX_TOKENS, ONES, PROMPT, RECEIVER, Offers, Policies, run, started
from tests.waiting import until


@pytest.fixture(scope="module")
def keeping(policies: Policies) -> Iterator[VllmEngine]:
    """One engine for the file, which runs in order: it serves version 0 up to the first refresh."""
    engine = started(policies.folder, kv_policy="keep")
    yield engine
    asyncio.run(engine.close())


def test_logprobs_are_those_of_a_forward_pass_at_the_true_temperature(keeping: VllmEngine, policies: Policies) -> None:
    completion = check_serves(keeping, policies.models[0], version=0)
    assert len(completion.tokens) == len(completion.logprobs) > 0
    cooler = Sampling(temperature=0.7, top_p=1.0, top_k=0, max_turn_tokens=24)
    completion = run(keeping.generate(PROMPT, cooler))
    at_temperature = forward_logprobs(policies.models[0], PROMPT, completion.tokens, temperature=0.7)
    assert worst(completion, at_temperature) < TOLERANCE
    assert worst(completion, forward_logprobs(policies.models[0], PROMPT, completion.tokens)) > 10 * TOLERANCE


def test_greedy_takes_the_likeliest_tokens(keeping: VllmEngine, policies: Policies) -> None:
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_turn_tokens=12)
    completion = run(keeping.generate(PROMPT, greedy))
    sequence = list(PROMPT)
    with torch.no_grad():
        for _ in completion.tokens:
            sequence.append(int(policies.models[0](torch.tensor([sequence])).logits[0, -1].argmax()))
    assert completion.tokens == sequence[len(PROMPT) :]


async def test_a_seed_fixes_the_tokens_whatever_runs_beside(keeping: VllmEngine) -> None:
    alone = await keeping.generate(PROMPT, ONES, seed=5)
    beside = [keeping.generate([*PROMPT, 1], ONES, seed=6), keeping.generate([*PROMPT, 2], ONES)]
    in_company, other, _ = await asyncio.gather(keeping.generate(PROMPT, ONES, seed=5), *beside)
    assert alone.tokens == in_company.tokens != other.tokens


def test_turns_of_an_agent_have_the_log_probabilities_of_a_forward(keeping: VllmEngine, policies: Policies) -> None:
    env = make_any_env("agent", {"agent": "tests.envhub.agents:splits"})
    allowance = replace(ALLOWANCE, max_tokens=MAX_TOKENS)
    tokenizer = load_tokenizer(policies.folder)
    trajectory = run(rollout_of(env, keeping, tokenizer=tokenizer, allowance=allowance))  # type: ignore[arg-type]
    tokens, logprobs = trajectory.token_array().tolist(), trajectory.behaviour_logprob_array().tolist()
    assert len(trajectory.turns) == 6 and len(trajectory.branch_starts) >= 2
    for turn in trajectory.turns:
        start = max(start for start in trajectory.branch_starts if start < turn.start)
        expected = forward_logprobs(policies.models[0], tokens[start : turn.start], tokens[turn.start : turn.stop])
        assert torch.allclose(torch.tensor(logprobs[turn.start : turn.stop]), expected, atol=TOLERANCE)


async def test_a_turn_ends_with_its_end_token_or_at_its_limit(keeping: VllmEngine, policies: Policies) -> None:
    end = policies.models[0].generation_config.eos_token_id
    generating = [keeping.generate([*PROMPT, member], LONG, seed=member) for member in range(24)]
    completions = await asyncio.gather(*generating)
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    cut = [completion for completion in completions if completion.finish_reason == "length"]
    assert stopped and cut
    assert all(completion.tokens.index(end) == len(completion.tokens) - 1 for completion in stopped)
    assert all(end not in completion.tokens and len(completion.tokens) == 200 for completion in cut)


def test_a_generation_ends_where_the_context_does(keeping: VllmEngine) -> None:
    assert len(run(keeping.generate([5] * (MAX_TOKENS - 3), ONES, seed=1)).tokens) <= 3
    with pytest.raises(ValueError, match=rf"a prompt of {MAX_TOKENS} tokens; .*`model.max_tokens` = {MAX_TOKENS}"):
        run(keeping.generate([5] * MAX_TOKENS, ONES))


def test_tokens_of_another_vocabulary_are_refused_and_hurt_nobody(keeping: VllmEngine) -> None:
    with pytest.raises(ValueError, match=r"token ids in \[5, 90000\]"):
        run(keeping.generate([5, 90_000], ONES))
    assert run(keeping.generate(PROMPT, ONES)).tokens


async def test_a_cancelled_generate_frees_its_request(keeping: VllmEngine) -> None:
    task = asyncio.create_task(keeping.generate(PROMPT, LONG))
    while keeping.load().kv_use == 0:
        if task.done():  # before anyone looked
            task = asyncio.create_task(keeping.generate(PROMPT, LONG))
        await asyncio.sleep(0.005)
    task.cancel()
    await until(lambda: keeping.load().num_running == 0 and keeping.load().kv_use == 0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_load_counts_tokens_as_they_are_sampled(keeping: VllmEngine) -> None:
    before, seen = keeping.load(), set[int]()
    long = msgspec.structs.replace(ONES, max_turn_tokens=64)
    task = asyncio.gather(*(keeping.generate([*PROMPT, number], long, seed=number) for number in range(32)))
    while not task.done():
        load = keeping.load()
        if load.generated_tokens == before.generated_tokens:
            seen.add(load.running_tokens)
        await asyncio.sleep(0.001)
    assert max(seen) > 32 and keeping.load().running_tokens == 0


async def test_generation_goes_on_during_a_slow_stage(keeping: VllmEngine, policies: Policies, server: Offers) -> None:
    await keeping.generate(PROMPT, ONES, seed=0)  # the first is slow, and a publisher that is silent is given up
    server.gate.clear()
    staging = asyncio.create_task(keeping.stage(server.offer(policies.models[1], policy_version=1)))
    before = keeping.load().generated_tokens
    await keeping.generate(PROMPT, ONES, seed=1)
    await keeping.generate(PROMPT, ONES, seed=2)
    assert not staging.done()
    server.gate.set()
    await staging
    assert keeping.load().generated_tokens - before > 20
    assert keeping.policy_version == 0


def test_corrupt_weights_are_refused_and_old_ones_go(keeping: VllmEngine, policies: Policies, server: Offers) -> None:
    offer = server.offer(policies.models[2], policy_version=1)
    server.corrupt(offer)
    with pytest.raises(WeightsRefused, match="does not match its hash"):
        run(keeping.stage(offer))
    with pytest.raises(ValueError, match="commit of version 1, but staged is None"):
        run(keeping.commit(1))
    check_serves(keeping, policies.models[0], version=0)


def test_weights_of_another_model_never_travel(keeping: VllmEngine, policies: Policies, server: Offers) -> None:
    layers = policies.models[1].model.layers.named_parameters()
    offer = server.offer_of({name: value.detach() for name, value in layers}, policy_version=1)
    server.gate.clear()
    with pytest.raises(WeightsUnfit, match="does not fit the model"):
        run(keeping.stage(offer))
    server.gate.set()


def test_a_refresh_keeps_running_requests_and_their_kv(keeping: VllmEngine, policies: Policies, server: Offers) -> None:
    old, new = policies.models[0], policies.models[1]
    crossings, pause_s = run(crossings_of(keeping, server.offer(new, policy_version=1)))
    assert 0 < pause_s < 10
    for crossing in crossings:
        check_crossing(crossing, old, new, keeps_kv=True)
        by_old = forward_logprobs(old, crossing.prompt, crossing.completion.tokens)
        assert worst(crossing.completion, by_old[crossing.boundary :], start=crossing.boundary) > 10 * TOLERANCE


def test_new_requests_are_of_the_new_weights_alone(keeping: VllmEngine, policies: Policies, server: Offers) -> None:
    """The prompt was served before: neither its cached prefix nor a packed output layer may survive a commit."""
    run(keeping.generate(PROMPT * 16, ONES))
    committed(keeping, server.offer(policies.models[2], policy_version=2))
    completion = run(keeping.generate(PROMPT * 16, ONES))
    assert keeping.policy_version == 2
    check_completion(completion, policies.models[2], version=2, prompt=PROMPT * 16)


async def test_requests_after_a_commit_use_its_weights(keeping: VllmEngine, policies: Policies, server: Offers) -> None:
    """Ordered before the commit, and with a prompt whose KV the old weights left in the prefix cache."""
    await keeping.generate(PROMPT * 16, ONES)
    await keeping.stage(server.offer(policies.models[1], policy_version=3))
    os.kill(keeping._process._popen.pid, signal.SIGSTOP)
    generating = asyncio.create_task(keeping.generate(PROMPT * 16, ONES))
    committing = asyncio.create_task(keeping.commit(3))
    await asyncio.sleep(0)  # each has placed its order, in this sequence
    os.kill(keeping._process._popen.pid, signal.SIGCONT)
    await committing
    check_completion(await generating, policies.models[1], version=3, prompt=PROMPT * 16)


def test_an_engine_that_idles_is_heard_of_every_second(keeping: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "MAX_SILENCE_S", 3.0)
    run(asyncio.sleep(5.0))
    assert run(keeping.generate(PROMPT, ONES)).tokens


async def test_when_its_process_is_killed_all_who_wait_hear_of_it(keeping: VllmEngine) -> None:
    """The last test of this engine."""

    async def kill() -> None:
        os.kill(keeping._process._popen.pid, signal.SIGKILL)

    assert await deaths_of(keeping, kill) == {"the engine process ended with exit code -9"}
    with pytest.raises(EngineDied, match="exit code -9"):
        await keeping.generate(PROMPT, ONES)


def test_a_process_that_hangs_is_killed() -> None:
    process = EngineProcess()
    os.kill(process._popen.pid, signal.SIGSTOP)
    with pytest.raises(EngineDied, match="the engine process hangs: it has sent nothing for 2 s"):
        process.receive(timeout_s=2.0)
    assert not psutil.pid_exists(process._popen.pid)


def test_sizes_that_vllm_refuses_are_a_value_error_and_leave_no_process(policies: Policies) -> None:
    process = EngineProcess()
    with pytest.raises(ValueError, match="max_model_len"):
        started(policies.folder, kv_policy="keep", process=process, model={"max_tokens": 1 << 20})
    assert not psutil.pid_exists(process._popen.pid)


def test_a_parser_that_vllm_does_not_have_is_refused_before_the_model_is_loaded(policies: Policies) -> None:
    with pytest.raises(ValueError, match=r"`model.tool_parser` must be empty, or one of vLLM's: .*; got 'hermos'"):
        started(policies.folder, kv_policy="keep", model={"tool_parser": "hermos"})


def gpu_options(folder: str, *settings: str, redis_url: str = "redis://127.0.0.1:1") -> dict[str, Any]:
    config = load_config(None, ["model.dtype=bfloat16", "learner.micro_batch_tokens=400000", *settings])
    given = {"model": config.model, "actors": config.actors, "receiver": replace(RECEIVER, redis_url=redis_url)}
    return vllm_start.gpu_options(EngineSettings(model_path=folder, policy_version=0, seed=0, **given), 80 << 30)


ALWAYS = {"hf_overrides": {"head_dtype": "float32"}, "async_scheduling": True}  # the learner's logits are float32 too


def shapes_folder(folder: Path, *, num_weights: int) -> str:
    """A token of its model has keys and values of 128 KiB in bfloat16."""
    sizes = {"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1 << 20}
    Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    (folder / SHAPES).write_text(json.dumps({"weight": [num_weights // 2, 2]}))
    return str(folder)


def test_with_a_size_of_its_kv_cache_an_engine_asks_for_no_share_of_its_gpu(tmp_path: Path) -> None:
    """As of vLLM 0.32: with that size it respects no share, but does not start where the share is not free."""
    small = shapes_folder(tmp_path, num_weights=1 << 30)
    shared = {"kv_cache_memory_bytes": 16 << 30, "gpu_memory_utilization": 0.01}
    assert gpu_options(small, "actors.kv_cache_bytes=17179869184") == ALWAYS | shared
    assert vllm_start._cpu_options(0)["kv_cache_memory_bytes"] == 64 << 20


def test_an_engine_leaves_the_room_of_a_shadow_within_its_share_if_its_kv_cache_keeps_half(tmp_path: Path) -> None:
    def share(*settings: str, redis_url: str = "redis://127.0.0.1:1") -> float:
        options = gpu_options(str(tmp_path), *settings, redis_url=redis_url)
        assert options.keys() == ALWAYS.keys() | {"gpu_memory_utilization"}
        return options["gpu_memory_utilization"]

    shapes_folder(tmp_path, num_weights=7 << 30)  # 14 GiB in bfloat16, and 16 with what its load needs
    assert share() == pytest.approx(0.9 - 16 / 80)
    assert share("model.dtype=float32") == 0.9  # 30 of 41 GiB would be the shadow's
    assert share("model.dtype=float32", "actors.tensor_parallel=2") == pytest.approx(0.9 - 16 / 80)
    assert share("actors.gpu_memory_utilization=0.4") == 0.4
    assert share(redis_url="") == 0.9  # without a run its weights never change
    assert share("model.max_tokens=319488") == pytest.approx(0.9 - 16 / 80)  # 39 GiB, which is what is left
    assert share("model.max_tokens=319489") == 0.9
    shapes_folder(tmp_path, num_weights=1 << 30)
    assert share("actors.gpu_memory_utilization=0.4") == pytest.approx(0.4 - 4 / 80)
