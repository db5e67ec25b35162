"""The bodies of answers in OpenAI's format: whole, and as chunks of a stream."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MODEL = "policy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer to a request."""

    text: str  # without the reasoning and the tool calls
    reasoning: str = ""
    tool_calls: Sequence[dict[str, Any]] = ()
    tokens: list[int]
    pieces: list[str]  # the text of each token; empty if the request did not ask for log-probabilities
    logprobs: list[float]
    finish_reason: str
    record: Callable[[], None] = lambda: None  # as a turn of the episode, once it is delivered

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, which an agent sends back in its next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message |= {"content": self.text or None, "tool_calls": list(self.tool_calls)}
        return message


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """All answers to a request."""

    answers: Sequence[Answer]
    num_prompt_tokens: int

    def body(self) -> dict[str, Any]:
        choices = [self._choice(index, answer) for index, answer in enumerate(self.answers)]
        return self._head("chat.completion") | {"choices": choices, "usage": self._usage()}

    def chunks(self, *, with_usage: bool) -> Iterator[bytes]:
        """The events of a stream. An answer is complete before it is sent, so all of it is one chunk."""
        head = self._head("chat.completion.chunk")
        for index, answer in enumerate(self.answers):
            for choice in self._deltas(index, answer):
                yield _event(head | {"choices": [choice]})
        if with_usage:
            yield _event(head | {"choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        name, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        return {"id": name, "object": kind, "created": created, "model": MODEL}

    def _usage(self) -> dict[str, int]:
        num_sampled = sum(len(answer.tokens) for answer in self.answers)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_sampled,
            "total_tokens": self.num_prompt_tokens + num_sampled,
        }

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        logprobs, reason = self._logprobs(answer), answer.finish_reason
        return {"index": index, "message": answer.message, "logprobs": logprobs, "finish_reason": reason}

    def _deltas(self, index: int, answer: Answer) -> Iterator[dict[str, Any]]:
        said = answer.message
        if answer.tool_calls:
            said["tool_calls"] = [{"index": place, **call} for place, call in enumerate(answer.tool_calls)]
        yield {"index": index, "delta": said, "logprobs": self._logprobs(answer), "finish_reason": None}
        yield {"index": index, "delta": {}, "logprobs": None, "finish_reason": answer.finish_reason}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not answer.pieces:
            return None
        content = [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode(errors="replace")), "top_logprobs": []}
            for piece, logprob in zip(answer.pieces, answer.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
