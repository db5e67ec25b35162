"""`slipstream collect --expert --retrace ROWS`: recorded episodes up to a random turn, which the expert then finishes.

With `--mistake`, a random other admissible action comes first, so the rows show how to recover from it. Everything is
played again in the environment, so every observation is a true answer to what came before it.
"""

import logging
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion, Restriction
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.config import Config
from slipstream.common.records.message import bare
from slipstream.common.records.trajectory import Sampling, Task
from slipstream.common.rows.message_fields import read_messages
from slipstream.common.rows.row_source import BadRow, Row, read_lines
from slipstream.common.text.action_format import ActionFormat, format_of
from slipstream.common.text.chat import ChatRules, reply_form
from slipstream.common.text.transcript import Transcriber
from slipstream.envhub.env import Env, EnvError
from slipstream.tools.play.collect_server import scoring_of
from slipstream.tools.replay.trajectory_rows import row_of
from slipstream.tools.run.collect_options import CollectOptions
from slipstream.tools.run.prepare import completion_of, expert_episodes, expert_reply

STATE = "retraced"
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Retraced:
    """What became of the recorded rows: the new ones, and the number of those left out, by reason."""

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


class Retracer:
    """Generates recorded replies before a random turn, then perhaps one mistake, then the actions of the expert."""

    _env: Env

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        written_as: ActionFormat,
        *,
        replies: Sequence[str],
        mistake: bool,
        dice: random.Random,
    ) -> None:
        """`playing_in` sets the environment."""
        self._tokenizer, self._format, self._dice = tokenizer, written_as, dice
        self._replies, self._mistake = replies, mistake
        self._cut = dice.randrange(len(replies))
        self._form = reply_form(tokenizer)
        self._turn = 0
        self.num_foreign = self._cut + mistake  # turns that are not the expert's
        self.has_no_mistake = False  # there was no other admissible action

    def playing_in(self, env: Env, _: int) -> Self:
        self._env = env
        return self

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, seed: int | None = None, restriction: Restriction | None = None
    ) -> Completion:
        """The tokens of the next reply."""
        turn, self._turn = self._turn, self._turn + 1
        if turn < self._cut:
            reply = self._replies[turn]
        else:
            reply = await expert_reply(self._env, self._format, self._action(turn))
        return completion_of(self._tokenizer, self._form.write(reply), prompt=tokens)

    def _action(self, turn: int) -> str:
        right = self._env.expert()
        if turn > self._cut or not self._mistake:
            return right
        taken = {bare(right), bare(self._format.parse(self._replies[turn]).text)}
        others = [action for action in self._env.admissible() or () if bare(action) not in taken]
        self.has_no_mistake = not others
        return self._dice.choice(others) if others else right


def retrace(config: Config, options: CollectOptions, tokenizer: PreTrainedTokenizerBase) -> Retraced:
    """Play every row of `options.retrace` again. Raises ConfigError for a file that cannot be read."""
    done, written_as = Retraced(), format_of(config.env)
    transcriber, scoring = Transcriber(tokenizer, rules=ChatRules.of(config.model)), scoring_of(config, tokenizer)
    for number, task, replies, row in _recorded(Path(options.retrace), config, done.left_out):
        dice = random.Random(f"{config.run.seed}/{number}")
        player = Retracer(tokenizer, written_as, replies=replies, mistake=options.mistake, dice=dice)
        episodes = expert_episodes(config, tokenizer, {number: task}, sampler=player.playing_in, scoring=scoring)
        try:
            (trajectory,) = episodes
        except (EnvError, EpisodeFailed) as failure:
            log.warning("row %d failed and is left out: %s", number, failure)
            done.left_out["failed in the environment"] += 1
            continue
        new = row_of(trajectory, transcriber, state=STATE, step=None)
        if reason := _reason_to_leave_out(new, player):
            done.left_out[reason] += 1
        else:
            _spare_foreign(new, player.num_foreign)
            done.rows.append(new | {"group_id": row.get("group_id", number), "member": number})
    return done


def _recorded(path: Path, config: Config, left_out: Counter[str]) -> Iterator[tuple[int, Task, list[str], Row]]:
    """The number, task and replies of each row that can be played again."""
    labels = config.env.entries()
    for line in read_lines(path):
        label, split, index = ([*str(line.row.get("task", "")).rsplit("/", 2), "", ""])[:3]
        try:
            read = [each.message for each in read_messages(line.row.get("messages"), "messages")]
            written = [each.content for each in read if each.role == "assistant"]
            replies = _of_turns(written, line.row.get("num_turns"))
        except BadRow:
            replies = []
        if line.fault or not replies:
            left_out["cannot be read"] += 1
        elif label not in labels or split != "train" or not re.fullmatch(r"\d{1,18}", index):
            left_out["not of a train task of this environment"] += 1
        else:
            yield line.number, Task(env=label, split="train", index=int(index)), replies, line.row


def _of_turns(written: list[T], num_turns: object) -> list[T]:
    """Those of the assistant's messages that belong to turns: the opening of a task may have examples before them."""
    return written[-num_turns:] if isinstance(num_turns, int) and num_turns > 0 else written


def _reason_to_leave_out(row: Row, played: Retracer) -> str:
    if row["messages"] is None:
        return "its messages cannot be recovered from the tokens"
    if played.has_no_mistake:
        return "there was no other admissible action"
    if row["num_turns"] <= played.num_foreign:
        return "over before the expert's first turn"
    return ""


def _spare_foreign(row: Row, num_foreign: int) -> None:
    """Mark the policy's first `num_foreign` messages, and those before them: they are not learned from."""
    places = [place for place, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    own = _of_turns(places, row["num_turns"])
    for place in [*places[: -len(own)], *own[:num_foreign]]:
        row["messages"][place]["loss"] = False
