"""`make judge-check`: the judges, and the teacher of distillation behind a URL, against a real vLLM on this machine.

A tiny model is taught the verdicts on two replies, as it cannot judge. It then judges through an engine of an actor,
through vLLM's server, and in a run of three synchronous steps. Marks, requests and tokens are compared with what they
must be, and the server's log-probabilities with a forward pass of the same folder.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from slipstream.actors.engine.vllm_environment import vllm_environment
from slipstream.actors.host.own_judge import OwnJudge
from slipstream.common.config.config import Config, load_config
from slipstream.common.config.model_config import TinyModelConfig
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import die_with_parent
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.common.text.chat import Chat
from slipstream.common.text.codec import encoder
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.chat_client import Answered
from slipstream.envhub.rewards.episode import Episode, Marked
from slipstream.envhub.rewards.judge import Judge
from slipstream.envhub.rewards.part import Part, judge_by, parts_of
from slipstream.envhub.rewards.sibling_judge import GroupJudge, Shown
from slipstream.learner.batch.pack import TokenSequence
from slipstream.learner.credit.teacher import PROBE, find_teacher
from slipstream.tools.play.fixed_policy import start_fixed_policy
from slipstream.tools.run.tiny_model import SPECIALS, save_random_model, with_chat
from slipstream.tools.run.up import free_port
from slipstream.tools.terminal.table import print_table

MAX_TOKENS = 512
STEPS = 3
REPLIES = ("alpha", "beta")
CONVERSATIONS = [
    [
        {"role": "user", "content": "Say alpha or beta."},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "answered"},
    ]
    for reply in REPLIES
]
RUBRIC = {"text": "You mark replies.", "scale": [0, 10], "criteria": {"clear": "It is clear."}}
JUDGE = {"part": "judge", "rubric": RUBRIC, "request": {"temperature": 0, "max_tokens": 48}}
KINDS: dict[str, dict[str, Any]] = {"clear": {}, "better": {"compare": "listwise"}, "best": {"compare": "pairwise"}}
MAX_LESSONS = 600
Lesson = tuple[tuple[Message, ...], str]  # a prompt, and the answer to it
START_S, RUN_S = 300.0, 600.0
TOLERANCE = 1e-3  # nats


def main() -> int:
    """Check everything; return 0 if all of it is as it must be."""
    with tempfile.TemporaryDirectory(prefix="judge-check-") as root:
        return _check(Path(root))


def _check(root: Path) -> int:
    folder, lessons = root / "model", asyncio.run(_lessons())
    expected = {name: asyncio.run(_marks(part)) for name, part in _parts("actors", _right).items()}
    print(f"teaching a tiny model {len(lessons)} answers", flush=True)
    _teach(folder, lessons)
    config_file = _write_config(root, folder)
    config = load_config(str(config_file), [])
    found = {"the policy of an actor": asyncio.run(_by_engine(config, expected))}
    with _server(folder, root / "server.log") as url:
        found["vLLM's server"] = asyncio.run(_by_server(url, folder, expected))
        found["the teacher"] = _teacher(url, folder)
    found[f"a run of {STEPS} synchronous steps"] = _run(root, config_file)
    for title, rows in found.items():
        print_table(title, rows)
    return 1 if any(value.startswith("WRONG") for rows in found.values() for value in rows.values()) else 0


def _parts(url: str, own_policy: Any = None, **settings: Any) -> dict[str, Part]:
    judge = JUDGE | {"url": url} | ({} if url == "actors" else {"model": "tiny"}) | settings
    parts = parts_of("env.rewards", {name: judge | kind for name, kind in KINDS.items()})
    if own_policy:
        judge_by(own_policy, {"": parts})
    return {part.name: part for part in parts}


async def _marks(part: Part) -> list[float]:
    """The marks of each reply alone, or of both compared."""
    if isinstance(part.measure, GroupJudge):
        members = [Shown(conversation=conversation, columns={}) for conversation in CONVERSATIONS]
        return [mark.value for mark in await part.measure(members)]
    found: list[Any] = [await part.values(_episode(conversation), timeout_s=60.0) for conversation in CONVERSATIONS]
    return [each.value if isinstance(each, Marked) else each for each in found]


def _episode(conversation: list[dict[str, str]]) -> Episode:
    return Episode(
        task=Task(env="dataset", split="train", index=0),
        columns={},
        prompt=conversation[:1],
        messages=conversation[:2],
        ending=conversation[2:],
        turns=[],
        max_turns=1,
        score=0.0,
        success=False,
        stop_reason="done",
        completion_ids=[],
    )


async def _right(body: bytes) -> Answered:
    """The verdict that the model is taught."""
    system, user = (message["content"] for message in json.loads(body)["messages"])
    episodes = json.loads(user).get("episodes", {})
    if "in random order" in system:
        text = json.dumps({"better": "1" if "alpha" in json.dumps(episodes["1"]) else "2"})
    elif episodes:
        text = json.dumps(
            {number: {"clear": 9 if "alpha" in json.dumps(shown) else 2} for number, shown in episodes.items()}
        )
    else:
        text = json.dumps({"clear": 8 if "alpha" in user else 3})
    return Answered(text=text, usage=None)


async def _lessons() -> list[Lesson]:
    """Prompts with the answers to them: two replies to the task, and every verdict on them."""
    lessons: list[Lesson] = [((Message("user", "Say alpha or beta."),), reply) for reply in REPLIES]

    async def note(body: bytes) -> Answered:
        answer = await _right(body)
        messages = tuple(Message(each["role"], each["content"]) for each in json.loads(body)["messages"])
        lessons.append((messages, answer.text))
        return answer

    parts = _parts("actors", note)
    for part in parts.values():
        await _marks(part)
    for conversation in CONVERSATIONS:  # equal members of a group are shown once
        assert isinstance(parts["better"].measure, GroupJudge)
        await parts["better"].measure([Shown(conversation=conversation, columns={})])
    return lessons


def _teach(folder: Path, lessons: Sequence[Lesson]) -> None:
    """Save a tiny model that gives each answer after its prompt."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [message.content for messages, _ in lessons for message in messages]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIALS)
    bpe.train_from_iterator([*texts, *(answer for _, answer in lessons)], trainer)
    tokenizer = with_chat(bpe, MAX_TOKENS)
    save_random_model(folder, tokenizer, config=TinyModelConfig(), max_tokens=MAX_TOKENS, seed=0)
    encode, rows = encoder(tokenizer), []
    for messages, answer in lessons:
        prompt = Chat(tokenizer).open(messages)
        rows.append((prompt, [*encode(answer), tokenizer.eos_token_id]))
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    wanted = torch.full((len(rows), longest), -100)
    for row, (prompt, reply) in enumerate(rows):
        tokens[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        wanted[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(MAX_LESSONS):
        logits = model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, wanted[:, 1:].flatten(), reduction="none")
        optimizer.zero_grad()
        loss[loss > 0].mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if float(loss.view(len(rows), -1)[len(REPLIES) :].max()) < 0.02:
            break
    else:
        raise RuntimeError(f"the tiny model has not learned its verdicts in {MAX_LESSONS} steps")
    model.save_pretrained(folder)


def _write_config(root: Path, folder: Path) -> Path:
    (root / "task.jsonl").write_text(json.dumps({"prompt": "Say alpha or beta.", "answer": "alpha"}) + "\n")
    rewards = {name: JUDGE | {"url": "actors", "weight": 0.5, "cache_size": 0} | kind for name, kind in KINDS.items()}
    rows = str(root / "task.jsonl")
    config = {
        "run": {"name": "judged", "root": str(root / "runs")},
        "model": {"path": str(folder), "max_tokens": MAX_TOKENS},
        "env": {"name": "dataset", "options": {"train": rows, "held_out": rows}, "rewards": rewards, "max_turns": 1},
        "sampling": {"max_turn_tokens": 8},
        "replay": {"group_size": 4, "groups_per_step": 2, "target_lag": 0},
        "actors": {"count": 2, "max_episodes": 8},
        "optim": {"lr": 1e-6},
        "learner": {"steps": STEPS, "micro_batch_tokens": 1024},
        "eval": {"num_tasks": 0},
    }
    path = root / "judged.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


async def _by_engine(config: Config, expected: dict[str, list[float]]) -> dict[str, str]:
    """Judge with the engine of an actor: marks, then what an answer that cannot be read and a small budget become."""
    setup = await asyncio.to_thread(start_fixed_policy, config, name="judge-check")
    assert setup.scoring is not None
    try:
        parts = {part.name: part for part in setup.scoring.parts["dataset"]}
        rows = {name: await _row(part, expected[name], setup.tokenizer) for name, part in parts.items()}
        policy = OwnJudge(sampler=setup.engine, tokenizer=setup.tokenizer, rules=setup.allowance.rules)
        other = RUBRIC | {"criteria": {"other": "It is other."}}
        for what, settings in (("malformed answers", {}), ("a budget of 2 requests", {"max_requests": 2})):
            part = _parts("actors", policy, rubric=other, **settings)["clear"]
            try:
                rows[what] = f"WRONG: {await _marks(part)}"
            except EnvError as error:
                rows[what] = f"{_judge(part).client.num_requests} requests, then: {error}"
        return rows
    finally:
        await setup.engine.close()


async def _by_server(url: str, folder: Path, expected: dict[str, list[float]]) -> dict[str, str]:
    tokenizer = load_tokenizer(folder)
    return {name: await _row(part, expected[name], tokenizer) for name, part in _parts(url).items()}


async def _row(part: Part, expected: list[float], tokenizer: Any) -> str:
    """The marks of a part, and its requests and tokens beside those of the verdicts that it must have got."""
    num_tokens, num_requests = 0, 0

    async def count(body: bytes) -> Answered:
        nonlocal num_tokens, num_requests
        answer = await _right(body)
        messages = tuple(Message(each["role"], each["content"]) for each in json.loads(body)["messages"])
        written = len(encoder(tokenizer)(answer.text)) + 1  # with the token that ends a turn
        num_tokens, num_requests = num_tokens + len(Chat(tokenizer).open(messages)) + written, num_requests + 1
        return answer

    await _marks(_parts("actors", count)[part.name])
    marks, client = await _marks(part), _judge(part).client
    found = f"marks {marks}, {client.num_requests} requests, {client.num_tokens} tokens"
    must = f"marks {expected}, {num_requests} requests, {num_tokens} tokens"
    return found if found == must else f"WRONG: {found}; must be {must}"


def _judge(part: Part) -> Judge:
    measure = part.measure.judges[""] if isinstance(part.measure, GroupJudge) else part.measure
    assert isinstance(measure, Judge)
    return measure


@contextlib.contextmanager
def _server(folder: Path, log: Path) -> Iterator[str]:
    """vLLM's OpenAI-compatible server of the model, on loopback; yields its URL."""
    port = free_port(8000)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(2 * MAX_TOKENS), "--enforce-eager", "--hf-overrides"]
    command += [json.dumps({"max_position_embeddings": 2 * MAX_TOKENS})]
    environment = os.environ | vllm_environment() | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, preexec_fn=partial(die_with_parent, os.getpid())
        )
    url, deadline = f"http://127.0.0.1:{port}/v1", time.monotonic() + START_S
    try:
        while True:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's server does not answer:\n{log.read_text()[-3000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/models", timeout=5):
                break
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _teacher(url: str, folder: Path) -> dict[str, str]:
    """The log-probabilities of the server as the learner asks for them, beside a forward pass of the folder."""
    teacher = find_teacher(url, probe=encoder(load_tokenizer(folder))(PROBE), max_tokens=MAX_TOKENS)
    random = np.random.default_rng(0)
    sequences = []
    for length in (2, 17, 100, 300, MAX_TOKENS):
        mask = random.random(length) < 0.5
        mask[0], mask[-1] = False, True
        zeros = np.zeros(length, dtype=np.float32)
        tokens = random.integers(len(SPECIALS), 300, length).astype(np.int32)
        sequences.append(
            TokenSequence(tokens=tokens, loss_mask=mask, behaviour_logprobs=zeros, advantages=zeros, kept=None)
        )
    found = teacher.logprobs(sequences)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    expected: list[float] = []
    for sequence in sequences:
        tokens_of = torch.tensor(sequence.tokens.tolist())
        with torch.no_grad():
            logprobs = model(tokens_of[None]).logits[0].log_softmax(-1)
        expected += [float(logprobs[place - 1, tokens_of[place]]) for place in np.flatnonzero(sequence.loss_mask)]
    worst = float(np.abs(found - np.array(expected)).max())
    measured = (
        f"{len(found)} log-probabilities of {len(sequences)} sequences, at most {worst:.1e} nats from a forward pass"
    )
    return {"log-probabilities": measured if worst < TOLERANCE else f"WRONG: {measured}"}


def _run(root: Path, config_file: Path) -> dict[str, str]:
    """`slipstream up`, whose actors judge each episode and each group."""
    command = [sys.executable, "-P", "-m", "slipstream.tools.cli.cli", "up", str(config_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    run_dir = RunDir(str(root / "runs"), "judged")
    if done.returncode:
        return {"end": f"WRONG: code {done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}"}
    ledger = json.loads(run_dir.summary.read_text())["ledger"]
    steps = [record for record in read_metrics(run_dir.metrics) if "trained/reward" in record]
    rows = {"groups": f"{ledger['trained']} trained, dropped {ledger['dropped']}, failed {ledger['failed']}"}
    for name in KINDS:
        marks = [round(record.get(f"trained/value_of_{name}", -1.0), 3) for record in steps]
        versions = [record.get(f"trained/value_of_{name}_policy_version") for record in steps]
        rows[name] = f"marks {marks} by versions {versions}"
    is_right = len(steps) == STEPS and not ledger["failed"]
    return rows if is_right else rows | {"end": "WRONG: a step is missing, or a judging failed"}


if __name__ == "__main__":
    sys.exit(main())
