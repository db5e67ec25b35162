"""`slipstream collect --server`: a model behind an OpenAI-compatible URL plays, and its reasoning is kept.

It is asked by messages, as its users ask it. Its answers are written in the tokens of the model that shall learn from
them, with a log-probability of 0, as those of an expert are.
"""

import asyncio
import hashlib
import json
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

import msgspec
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion, Engine, EngineError, Sampler
from slipstream.actors.episode.allowance import Allowance
from slipstream.actors.episode.episode_record import Attempt, EpisodeRecord
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.actors.group.episode_reward import Scoring
from slipstream.actors.group.group import Episodes, EpisodeSetup
from slipstream.actors.search.stretch import play_stretch
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.long_work import LongWork, report_on_stderr
from slipstream.common.process.output import appended, sync
from slipstream.common.process.wire import MALFORMED, MAX_FRAME_BYTES, WireError, encode
from slipstream.common.records.frame_file import read_frames, write_frames
from slipstream.common.records.trajectory import (
    InvalidTrajectory,
    Provenance,
    Sampling,
    Task,
    Trajectory,
    decode_trajectory,
)
from slipstream.common.text.action_format import format_of
from slipstream.common.text.chat import ReplyForm, reply_form
from slipstream.common.text.thought import without_thought
from slipstream.common.text.tokenizer import text_root
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.chat_client import Answered
from slipstream.envhub.rewards.part import own_judge, read_as, reward_parts
from slipstream.tools.data.chat_file import ChatServer
from slipstream.tools.play.fixed_policy import attempt_at
from slipstream.tools.run.prepare import completion_of

log = logging.getLogger(__name__)


class Journal:
    """The episodes that have ended, in a file, so that none is played twice. A context manager."""

    def __init__(self, path: Path, config: Config, server: ChatServer, *, vocab_size: int) -> None:
        """Raises ConfigError if the file is not a journal, or of another server, or of other settings."""
        self.path, self.played = path, dict[tuple[int, int], Trajectory]()
        self._file = appended(path)
        try:
            self._read(_identity(config, server), vocab_size)
        except BaseException:
            self._file.close()
            raise

    def _read(self, identity: bytes, vocab_size: int) -> None:
        path, size = self.path, 0
        try:
            for frame in read_frames(path):
                if size == 0 and frame != identity:
                    raise ConfigError(
                        f"{path} was begun with another server or other settings; repeat that command, or remove it"
                    )
                if size:
                    episode = decode_trajectory(frame, max_bytes=MAX_FRAME_BYTES, vocab_size=vocab_size)
                    self.played[episode.group_id, episode.member] = episode
                size += 4 + len(frame)
        except (WireError, InvalidTrajectory, *MALFORMED):
            if size == 0 and path.stat().st_size > 4 + len(identity):
                raise ConfigError(f"{path} is not a journal of `slipstream collect`; name another FILE") from None
            report_on_stderr(f"{path} ends within an episode, which is played again")
        self._file.truncate(size)
        if size == 0:
            self._append(identity)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, episode: Trajectory) -> None:
        """Keep an episode, durably."""
        self._append(encode(episode, compress=True))
        self.played[episode.group_id, episode.member] = episode

    def _append(self, frame: bytes) -> None:
        write_frames(self._file, [frame])
        sync(self._file)


def _identity(config: Config, server: ChatServer) -> bytes:
    """What the episodes depend on."""
    env = msgspec.to_builtins(config.env, enc_hook=str)
    settings = [server.client.url, server.model, dict(server.request), env, msgspec.to_builtins(config.model)]
    text = json.dumps([*settings, config.sampling.max_turn_tokens], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


async def play_served(
    config: Config,
    server: ChatServer,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Mapping[int, Task],
    *,
    journal: Journal,
) -> int:
    """Play each task `replay.group_size` times, except for what `journal` has; return the number of failures."""
    setup = served_setup(config, server, tokenizer)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_turn_tokens=config.sampling.max_turn_tokens)
    attempts = [
        attempt_at(config, setup, task, sampling, group_id=group_id, member=member)
        for group_id, task in tasks.items()
        for member in range(config.replay.group_size)
        if (group_id, member) not in journal.played
    ]
    room = asyncio.Semaphore(server.client.max_concurrent)
    work = LongWork("episodes of the server", len(attempts), report=report_on_stderr)

    async def play(attempt: Attempt) -> int:
        record = EpisodeRecord(attempt=attempt)
        async with room:
            sampler = Served(server=server, record=record, setup=setup)
            try:
                played = await play_stretch(record, setup=setup, num_turns=config.env.max_turns, sampler=sampler)
            except EpisodeFailed as error:
                log.warning("task %d, attempt %d: %s", attempt.task.index, attempt.member, error)
                return 1
        journal.add(played.record)
        work.done()
        return 0

    return sum(await asyncio.gather(*map(play, attempts)))


def served_setup(config: Config, server: ChatServer, tokenizer: PreTrainedTokenizerBase) -> EpisodeSetup:
    """The setup of episodes that a server plays, each with its own `Served`, without an engine. Raises ConfigError."""
    return EpisodeSetup(
        run_id=config.run.name,
        actor=server.model,
        envs=config.env.entries(),
        engine=cast(Engine, None),
        tokenizer=tokenizer,
        action_format=format_of(config.env),
        allowance=replace(Allowance.of(config), max_thought_tokens=0),  # the server chooses
        provenance=Provenance(host=socket.gethostname(), instance_kind="reserved", price_per_hour=0.0),
        episodes=Episodes(max_running=server.client.max_concurrent),
        scoring=scoring_of(config, tokenizer),
    )


def scoring_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> Scoring:
    """What scores the episodes of a player without an engine: of `env.rewards` only the part that is the score counts.

    Raises ConfigError if an engine would have to judge it.
    """
    scores = {
        label: tuple(part for part in parts if part.success_from is not None)
        for label, parts in reward_parts(config.env.entries()).items()
    }
    if own := [part.key for parts in scores.values() for part in parts if own_judge(part)]:
        raise ConfigError(f"`{own[0]}`: no engine runs here, so url: actors cannot judge; name a URL")
    read_as(text_root(tokenizer), scores)
    return Scoring(parts=scores, tokenizer=tokenizer, allowance=Allowance.of(config))


@dataclass(kw_only=True, slots=True)
class Served(Sampler):
    """Has a server write the turns of one episode, from the messages that its record has."""

    server: ChatServer
    record: EpisodeRecord
    setup: EpisodeSetup
    form: ReplyForm = field(init=False)
    answers: list[str] = field(default_factory=list)  # so far, without thoughts: a server gets none back

    def __post_init__(self) -> None:
        self.form = reply_form(self.setup.tokenizer)

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        """Return the server's answer to the conversation, with its thought before it. Raises EngineError."""
        try:
            answered = await self.server.client.answer(self.server.body(self._conversation()))
        except EnvError as error:
            raise EngineError(str(error)) from None
        if answered.is_cut:
            raise EngineError("the answer was cut off at `max_tokens` of `request`; raise it")
        room = min(sampling.max_turn_tokens, self.setup.allowance.max_tokens - len(tokens))
        reply = self._completion(self._with_thought(answered), prompt=tokens, room=room)
        self.answers.append(without_thought(answered.text, prompt="", marks=self.form.thoughts).lstrip())
        return reply

    def _conversation(self) -> list[dict[str, Any]]:
        messages = [msgspec.structs.asdict(message) for message in self.record.opening]
        for answer, exchange in zip(self.answers, self.record.exchanges, strict=True):
            messages.append({"role": "assistant", "content": answer})
            messages += [msgspec.structs.asdict(message) for message in exchange.answer]
        # A server takes a result of a tool only after a call, which these texts are not.
        return [message | {"role": "user"} if message["role"] == "tool" else message for message in messages]

    def _with_thought(self, answered: Answered) -> str:
        """The answer after the thought that the server sent apart from it, in the marks of the model's template."""
        if not answered.reasoning.strip():
            return answered.text
        template = str(self.setup.tokenizer.chat_template)
        opening, closing = next((marks for marks in self.form.thoughts if marks[0] in template), self.form.thoughts[0])
        return f"{opening}\n{answered.reasoning.strip()}\n{closing}\n\n{answered.text}"

    def _completion(self, content: str, *, prompt: list[int], room: int) -> Completion:
        """The reply in tokens. Raises EngineError if the model cannot write it, or it does not fit."""
        try:
            reply = completion_of(self.setup.tokenizer, self.form.write(content), prompt=prompt)
        except ValueError as error:
            raise EngineError(f"the model's template cannot write the answer: {error}") from None
        if len(reply.tokens) > room:
            raise EngineError(
                f"an answer of {len(reply.tokens)} tokens, with {room} left; raise sampling.max_turn_tokens and "
                "model.max_tokens"
            )
        if self.form.turns.split_reply(content) != content:
            raise EngineError("the answer has the text of a mark that ends a turn")
        return reply
