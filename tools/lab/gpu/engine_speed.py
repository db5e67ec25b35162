"""How fast an actor's engine generates beside vLLM alone, on the same requests. One side a process.

    python -m slipstream.tools.lab.gpu.engine_speed ours MODEL LENGTHS [--turns 1 4] ...
    python -m slipstream.tools.lab.gpu.engine_speed vllm MODEL LENGTHS ...
    python -m slipstream.tools.lab.gpu.engine_speed offline MODEL LENGTHS ...

Our side notes in LENGTHS what it generated. vLLM generates as many tokens: turn by turn, or offline, of single turns.

An episode is a conversation of `--turns` generations: each prompt is the one before, what was generated, and 32 tokens
of an observation. `--at-once` episodes run side by side. vLLM alone is its AsyncLLM, or its LLM, at its defaults, with
the log-probability of each token, and as much memory for keys and values. Prints one JSON line a repeat.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from slipstream.common.records.trajectory import Sampling
from slipstream.tools.lab.gpu.turn import add_turn, await_turn

OBSERVATION_TOKENS = 32
PROMPT_TOKENS = 64
MAX_TOKENS = 2048  # of a conversation
KV_BYTES = 8 << 30
Generate = Callable[[list[int], int], Awaitable[list[int]]]  # prompt and tokens at most, to what was generated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("ours", "vllm", "offline"))
    parser.add_argument("model")
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=200, help="of an episode, at most")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-bytes", type=int, default=KV_BYTES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", nargs=2, metavar=("PY_SPY", "OUT"), help="sample the engine in one more repeat")
    add_turn(parser)
    options = parser.parse_args()
    begun = time.monotonic()
    if options.side == "ours":
        asyncio.run(_ours(options, begun))
        return
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    arguments = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": MAX_TOKENS,
        "max_num_seqs": options.at_once,
        "kv_cache_memory_bytes": options.kv_bytes,
        "gpu_memory_utilization": 0.5,
        "load_format": "auto" if list(Path(options.model).glob("*.safetensors")) else "dummy",
        "disable_log_stats": True,
    }
    if options.side == "vllm":
        asyncio.run(_vllm(options, begun, arguments))
    else:
        _offline(options, begun, arguments)


async def _ours(options: argparse.Namespace, begun: float) -> None:
    from slipstream.actors.engine.vllm_engine import EngineProcess, VllmEngine
    from slipstream.tools.lab.families.measure import engine_settings

    settings = engine_settings(
        Path(options.model),
        options.dtype,
        policy_version=0,
        max_tokens=MAX_TOKENS,
        kv_cache_bytes=options.kv_bytes,
        max_episodes=options.at_once,
    )
    process = EngineProcess()
    engine, pid = VllmEngine(process, settings), process._popen.pid
    print(json.dumps({"side": "ours", "start_s": round(time.monotonic() - begun, 1), "pid": pid}), flush=True)

    await_turn(options.turn)

    async def generate(prompt: list[int], num_tokens: int) -> list[int]:
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=num_tokens)
        return (await engine.generate(prompt, sampling)).tokens

    for turns in options.turns:
        lengths: dict[str, int] = {}
        await _measured(options, turns, generate, lengths, process=psutil.Process(pid))
        options.lengths.with_suffix(f".{turns}.json").write_text(json.dumps(lengths))
    if options.profile:
        py_spy, out = options.profile
        how = ["--nonblocking", "--duration", "4", "--rate", "250", "--format", "raw"]
        spy = await asyncio.create_subprocess_exec(py_spy, "record", *how, "--output", out, "--pid", str(pid))
        await _measured(options, 1, generate, {}, process=psutil.Process(pid))
        await spy.wait()
    await engine.close()


async def _vllm(options: argparse.Namespace, begun: float, arguments: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    print(json.dumps({"side": "vllm", "start_s": round(time.monotonic() - begun, 1)}), flush=True)
    await_turn(options.turn)
    counter = iter(range(1 << 40))

    async def generate(prompt: list[int], num_tokens: int) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate({"prompt_token_ids": prompt}, _params(num_tokens), str(next(counter))):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    for turns in options.turns:
        await _measured(options, turns, generate, _lengths(options, turns), process=None)
    llm.shutdown()


def _offline(options: argparse.Namespace, begun: float, arguments: dict[str, Any]) -> None:
    from vllm import LLM

    llm = LLM(**arguments)
    print(json.dumps({"side": "offline", "start_s": round(time.monotonic() - begun, 1)}), flush=True)
    await_turn(options.turn)
    lengths, draw = _lengths(options, turns=1), random.Random(0)
    for repeat in range(options.repeats + 1):
        prompts = [{"prompt_token_ids": _drawn(draw, PROMPT_TOKENS)} for _ in range(options.episodes)]
        params = [_params(lengths.get(f"{repeat} {number} 0", options.tokens)) for number in range(options.episodes)]
        started = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        total = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps(_row(options, 1, repeat, total, time.monotonic() - started)), flush=True)


def _params(num_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _lengths(options: argparse.Namespace, turns: int) -> dict[str, int]:
    """What our side noted, by repeat, episode and turn."""
    noted = options.lengths.with_suffix(f".{turns}.json")
    lengths: dict[str, int] = json.loads(noted.read_text()) if noted.exists() else {}
    return lengths


def _drawn(draw: random.Random, num_tokens: int) -> list[int]:
    return [draw.randrange(1000, 40000) for _ in range(num_tokens)]


def _row(options: argparse.Namespace, turns: int, repeat: int, tokens: int, wall_s: float) -> dict[str, Any]:
    return {
        "side": options.side,
        "model": Path(options.model).name,
        "turns": turns,
        "repeat": repeat,
        "tokens": tokens,
        "s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s),
    }


async def _measured(
    options: argparse.Namespace,
    turns: int,
    generate: Generate,
    lengths: dict[str, int],
    *,
    process: psutil.Process | None,
) -> None:
    """Run the episodes once to warm up, then `--repeats` times; note what was generated in `lengths`."""
    draw = random.Random(0)
    observation = _drawn(draw, OBSERVATION_TOKENS)
    slots = asyncio.Semaphore(options.at_once)
    recorded = dict(lengths)

    async def episode(prompt: list[int], number: int, repeat: int) -> int:
        async with slots:
            tokens, generated = list(prompt), 0
            for turn in range(turns):
                key = f"{repeat} {number} {turn}"
                new = await generate(tokens, recorded.get(key, options.tokens // turns))
                lengths[key] = len(new)
                generated += len(new)
                tokens += new + observation
            return generated

    for repeat in range(options.repeats + 1):
        prompts = [_drawn(draw, PROMPT_TOKENS) for _ in range(options.episodes)]  # so that no repeat finds prefixes
        cpu = process.cpu_times() if process else None
        begun = time.monotonic()
        total = sum(await asyncio.gather(*(episode(prompt, k, repeat) for k, prompt in enumerate(prompts))))
        wall_s = time.monotonic() - begun
        row = _row(options, turns, repeat, total, wall_s)
        if process and cpu:
            now = process.cpu_times()
            row["engine_cpu"] = round((now.user + now.system - cpu.user - cpu.system) / wall_s, 2)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
