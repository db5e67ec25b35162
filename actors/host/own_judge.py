"""The run's own policy as a judge: the actor's engine answers `slipstream.envhub.rewards.judge`.

A request is no episode: it takes no place in `actors.max_episodes`, its tokens are never trained, and it continues
while the actor refreshes or drains. So an episode that waits for its mark waits for the engine alone.
"""

import time
from dataclasses import dataclass, field

import msgspec
from transformers import PreTrainedTokenizerBase

from slipstream.actors.engine.engine import EngineDied, EngineError, Sampler
from slipstream.actors.episode.answer import in_tokens
from slipstream.actors.group.group import Episodes
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.http_answer import Passing
from slipstream.common.process.wire import MALFORMED
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Sampling
from slipstream.common.text.chat import Chat
from slipstream.envhub.env import EnvError
from slipstream.envhub.rewards.chat_client import Answered, Usage


class _Request(msgspec.Struct, frozen=True):
    messages: list[Message]
    temperature: float
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnJudge:
    """Answers with what the policy writes after the judge's prompt, without its thought."""

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    model: ModelConfig
    episodes: Episodes = field(default_factory=Episodes)  # what the judge writes counts as kept: it is of use

    async def __call__(self, body: bytes) -> Answered:
        """Answer one request.

        Raises EngineDied, Passing if the engine failed, EnvError if the prompt is too long, or no text that a tokenizer
        takes.
        """
        try:
            request = msgspec.json.decode(body, type=_Request)
        except MALFORMED as error:  # half a surrogate pair in a column of the task
            raise EnvError(
                f"what the judge is shown cannot be sent: {error}; correct the columns of the task"
            ) from None
        chat = Chat(self.tokenizer, model=self.model, started_at_s=time.time())
        prompt = in_tokens(chat.open, tuple(request.messages))
        room = self.model.max_tokens - len(prompt)
        if room < 1:
            raise EnvError(
                f"the judge's prompt of {len(prompt)} tokens leaves no room in `model.max_tokens` = "
                f"{self.model.max_tokens}; lower max_chars of the judge"
            )
        sampling = Sampling(
            temperature=request.temperature, top_p=1.0, top_k=0, max_turn_tokens=min(request.max_tokens, room)
        )
        try:
            completion = await self.sampler.generate(prompt, sampling)
        except EngineDied:
            raise
        except EngineError as error:
            raise Passing(f"the actor's engine failed: {error}") from None
        chat.reply(completion.tokens)
        num_read, num_written = len(prompt), len(completion.tokens)
        self.episodes.kept_tokens += num_written
        return Answered(
            text=chat.answer,
            is_cut=completion.finish_reason == "length",
            usage=Usage(total_tokens=num_read + num_written, prompt_tokens=num_read, completion_tokens=num_written),
            policy_version=completion.version_spans[-1].policy_version,
        )
