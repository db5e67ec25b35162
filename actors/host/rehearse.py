"""Renders the first messages of every environment, and of a judge that is the policy, before an engine starts.

A chat template may refuse system messages, or two messages of a user in a row. Without this check, every attempt at
every task would fail.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slipstream.actors.episode.actions import with_instructions
from slipstream.actors.episode.answer import Boundary, CheckedEnv
from slipstream.actors.episode.fresh_env import fresh_env
from slipstream.actors.episode.rollout import EpisodeFailed
from slipstream.common.config.config import Config
from slipstream.common.config.env_config import MixtureEntry
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Task
from slipstream.common.text.action_format import ACT, ToolCalls, format_of
from slipstream.common.text.chat import Chat
from slipstream.common.text.chat_template import REFUSALS
from slipstream.common.text.codec import encoder
from slipstream.common.text.pieces import check_pieces, check_words
from slipstream.envhub.catalogue import DRIVING, make_any_env, num_rows
from slipstream.envhub.env import EnvError, Observation
from slipstream.envhub.rewards.part import own_judge, reward_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOM_OF_TEMPLATE = 512  # tokens that a chat template may write beside the messages

log = logging.getLogger(__name__)


def check_template(run: Config, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError if the chat template refuses the conversation of an environment, or the prompt of a judge.

    An environment that cannot start is only logged: its episodes report and count the failure.
    """
    check_pieces(tokenizer)
    _check_judges(run, tokenizer)
    for label, part in run.env.entries().items():
        if part.name in DRIVING:
            if run.env.show_admissible:
                raise _without_list(part.name, "plays its episodes itself")
            continue  # it renders its prompts itself
        try:
            first = asyncio.run(_first_observation(run, label))
        except (EnvError, EpisodeFailed) as error:
            log.warning("environment %s did not start, so its first prompt is not checked: %s", label, error)
            continue
        _check(run, part.name, first, tokenizer)
        asyncio.run(_check_lengths(run, label, part, tokenizer))


def _check_judges(run: Config, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError if the run's own policy is a judge, and its template or context has no room for a rubric."""
    for part in (part for of_env in reward_parts(run.env.entries()).values() for part in of_env):
        if judge := own_judge(part):
            messages = (Message("system", judge.rubric.instructions), Message("user", "a"))
            with _explained(run, tokenizer, f"the prompt of the judge `{part.key}`", messages):
                num_tokens = len(Chat(tokenizer, model=run.model).open(messages))
            if num_tokens >= run.model.max_tokens:
                raise ConfigError(
                    f"`{part.key}.rubric` must be shorter than `model.max_tokens` = {run.model.max_tokens}, got a "
                    f"prompt of {num_tokens} tokens without an episode; shorten it, or raise `model.max_tokens`"
                )


async def _check_lengths(run: Config, label: str, part: MixtureEntry, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ConfigError if prompts in the rows of a file leave no room for a reply: every attempt at them would fail.

    A text has at most as many tokens as bytes, so only long ones are encoded.
    """
    most, chat, long = run.model.max_tokens, Chat(tokenizer, model=run.model), list[str]()
    env, counts = make_any_env(part.name, part.options), num_rows(part)
    for split, index in [(split, index) for split, number in counts.items() for index in range(number)]:
        task = Task(env=label, split=split, index=index)
        messages = with_instructions((await env.reset(task)).messages, format_of(run.env))  # type: ignore[union-attr]
        if sum(len(message.content.encode()) for message in messages) + ROOM_OF_TEMPLATE < most:
            continue
        with _explained(run, tokenizer, f"the prompt of task {task.task_id}", messages):
            num_tokens = len(chat.open(messages))
        long += [f"task {task.task_id} with {num_tokens}"] if num_tokens >= most else []
    if long:
        raise ConfigError(
            f"`model.max_tokens` must be above the tokens of every prompt, got {most}: {len(long)} of "
            f"{sum(counts.values())} rows have as many or more, such as {long[0]}; raise it, or remove these rows"
        )


async def _first_observation(run: Config, label: str) -> Observation:
    """The first observation of an environment's first task, which is held out if `env.options` name only those.

    Raises EnvError, EpisodeFailed; ConfigError if the run shows what is possible, and the environment does not list it.
    """
    options = run.env.entries()[label].options
    split = "held_out" if options.get("held_out") and not options.get("train") else "train"
    task, timeout_s = Task(env=label, split=split, index=0), run.env.step_timeout_s
    async with fresh_env(run.env.entries(), task, timeout_s=timeout_s) as env:
        observation = await CheckedEnv(env, timeout_s=timeout_s).reset(task)  # type: ignore[arg-type]
        if run.env.show_admissible:
            with Boundary():
                possible = list(env.admissible() or ())  # type: ignore[union-attr]
            if not possible:
                raise _without_list(run.env.entries()[label].name, "does not list its actions")
        return observation


def _without_list(name: str, why: str) -> ConfigError:
    return ConfigError(f"`env.show_admissible` must be false for `env.name` {name}: it {why}")


def _check(run: Config, name: str, first: Observation, tokenizer: "PreTrainedTokenizerBase") -> None:
    action_format, chat = format_of(run.env), Chat(tokenizer, model=run.model)
    messages = with_instructions(tuple(first.messages), action_format)
    calls = isinstance(action_format, ToolCalls)
    tools = (first.tools or (ACT,)) if calls else ()
    result = Message("tool" if calls else "user", "b")
    with _explained(
        run, tokenizer, f"the conversation of `env.name` {name}", (*messages, Message("assistant", "a"), result)
    ):
        if calls and chat.open(messages) == chat.open(messages, tools=tools):
            raise ConfigError(
                f"the chat template in {tokenizer.name_or_path} does not show tools, which `env.action_format` tools "
                "needs; choose a model that calls tools, or another format"
            )
        chat.open(messages, tools=tools)
        check_words(tokenizer, [chat.text], where=f"the first prompt of `env.name` {name}")
        chat.reply(encoder(tokenizer)("a"))
        chat.extend((result,))


@contextlib.contextmanager
def _explained(
    run: Config, tokenizer: "PreTrainedTokenizerBase", what: str, messages: Sequence[Message]
) -> Iterator[None]:
    """Make the refusal of a template a ConfigError: it refuses `what`, which has `messages`."""
    try:
        yield
    except ConfigError:
        raise
    except REFUSALS as error:
        cure = "choose a model whose template accepts it"
        if run.model.roles != "alternate":
            cure = f"set model.roles=alternate, or {cure}"
        raise ConfigError(
            f"the chat template in {tokenizer.name_or_path} refuses {what}, whose roles are "
            f"{', '.join(message.role for message in messages)}: {error}; {cure}"
        ) from error
