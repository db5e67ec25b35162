"""A teacher behind a URL: what it is asked, that it teaches as the same model in a folder does, and its failures."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.common.process.config_error import ConfigError
from slipstream.common.text.codec import encoder
from slipstream.common.text.tokenizer import load_tokenizer
from slipstream.envhub.rewards import attempts
from slipstream.learner.batch.pack import sequences_of
from slipstream.learner.credit.teacher import PROBE, Teacher, TeacherAway, find_teacher
from slipstream.learner.ranks.ranks import Ranks
from tests.http_stand_in import Asked, HttpStandIn, Reply
from tests.learner.credit.test_distillation import DISTIL, config_of, student, teacher
from tests.learner.credit.test_token_advantages import two_turns
from tests.learner.even_game import load_player, train
from tests.tools.run.tiny_model import any_id

__all__ = ["any_id", "student", "teacher"]  # fixtures
pytestmark = pytest.mark.usefixtures("any_id")

SEQUENCES = sequences_of(two_turns(0.0, 1.0), advantage=0.0)  # one, of which three tokens were sampled
Answer = tuple[int, Any]


class Server(HttpStandIn):
    """Answers as vLLM's server does, with a model of transformers; `answer` may answer otherwise."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.encode = encoder(load_tokenizer(folder))
        self.answer: Callable[[str, Any], Answer | None] = lambda path, body: None
        self.requests: list[tuple[str, Any]] = []
        self.num_cut = 0  # of the next replies, which end in the middle
        self.lock = threading.Lock()
        super().__init__(self._reply)
        self.url += "/v1"

    def _reply(self, asked: Asked) -> Reply:
        body = json.loads(asked.body) if asked.body else None
        with self.lock:
            self.requests.append((asked.path, body))
            status, reply = self.answer(asked.path, body) or (200, self.honest(asked.path, body))
            is_cut, self.num_cut = self.num_cut > 0, self.num_cut - 1
        text = json.dumps(reply).encode()
        return status, {"Content-Length": str(len(text))}, text[: len(text) // 2] if is_cut else text

    @torch.no_grad()
    def honest(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "large", "object": "model", "max_model_len": 32768}]}
        if path == "/tokenize":
            assert body["add_special_tokens"] is False
            return {"count": 1, "tokens": self.encode(body["prompt"])}
        assert path == "/v1/completions" and body["model"] == "large" and body["prompt_logprobs"] == 0
        tokens = body["prompt"]
        logprobs = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        found = [
            {str(token): {"logprob": float(logprobs[place, token]), "rank": 1, "decoded_token": "x"}}
            for place, token in enumerate(tokens[1:])
        ]
        return {"choices": [{"index": 0, "text": "x", "prompt_logprobs": [None, *found]}]}


@pytest.fixture
def server(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(attempts, "FIRST_WAIT_S", 0.01)
    with Server(teacher) as server:
        yield server


def test_a_server_teaches_as_the_same_model_in_a_folder_does(
    student: Path, teacher: Path, server: Server, tmp_path: Path, ranks: Ranks
) -> None:
    metrics = []
    for name, reference in (("url", server.url), ("folder", str(teacher))):
        config = config_of(student, *DISTIL, f"objective.reference_model={reference}")
        learner, player = load_player(config, tmp_path / name, ranks)
        metrics.append(train(learner, player, steps=3)[0])
    for of_url, of_folder in zip(*metrics, strict=True):
        assert of_url.reference_kl == pytest.approx(of_folder.reference_kl, abs=1e-4)
        assert of_url.grad_norm == pytest.approx(of_folder.grad_norm, rel=1e-3)


def test_the_log_probabilities_are_those_of_the_sampled_tokens(server: Server) -> None:
    found = Teacher(url=server.url, model="large").logprobs(SEQUENCES)
    with torch.no_grad():
        logprobs = server.model(torch.tensor([[1, 2, 3, 4, 5]])).logits[0].log_softmax(-1)
    # Tokens 2, 3 and 5 were sampled, each after the token before it.
    assert found == pytest.approx(np.array([logprobs[0, 2], logprobs[1, 3], logprobs[3, 5]]), abs=1e-5)


def test_what_may_pass_is_tried_again(server: Server) -> None:
    left = [(503, {}), (429, {})]
    server.answer = lambda path, body: left.pop() if left else None
    assert len(Teacher(url=server.url, model="large").logprobs(SEQUENCES)) == 3
    assert len(server.requests) == 3
    server.num_cut = 2  # as of a server that is stopped while it answers
    assert len(Teacher(url=server.url, model="large").logprobs(SEQUENCES)) == 3
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((400, {"message": "too long"}), "refused with status 400.*too long"),
        ((302, {}), "refused with status 302"),
        ((200, {"choices": []}), "no log-probability for each token"),
        ((200, {"choices": [{"prompt_logprobs": [None]}]}), "1 log-probabilities for 5 tokens"),
        ((200, {"choices": [{"prompt_logprobs": [None, {}, {}, {}, {}]}]}), "no log-probability for each token"),
        ((200, {"choices": [{"text": "x"}]}), "something else than vLLM's server"),
        ((200, ["x" * (2 << 20)]), "the reply has more than"),
    ],
)
def test_an_answer_that_cannot_be_used_ends_the_step_with_its_reason(server: Server, answer: Answer, why: str) -> None:
    server.answer = lambda path, body: answer
    with pytest.raises(TeacherAway, match=why):
        Teacher(url=server.url, model="large").logprobs(SEQUENCES)


def test_a_server_that_is_away_is_given_up_at_the_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.learner.credit.teacher.DEADLINE_S", 0.5)
    server.answer = lambda path, body: (500, {})
    with pytest.raises(TeacherAway, match=r"no answer within 0.5 s.*status 500"):
        Teacher(url=server.url, model="large").logprobs(SEQUENCES)


@pytest.mark.parametrize(
    ("path", "reply", "why"),
    [
        ("/tokenize", {"tokens": [1, 2, 3]}, "large, which has another tokenizer"),
        ("/v1/models", {"data": [{"id": "a"}, {"id": "b"}]}, "must serve one model, got a, b"),
        ("/v1/models", {"data": [{"id": "a", "max_model_len": 64}]}, r"context above `model.max_tokens` = 64, got 64"),
        ("/v1/models", {"error": "no"}, "cannot be asked: .*something else"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_at_the_start(server: Server, path: str, reply: Any, why: str) -> None:
    server.answer = lambda asked, body: (200, reply) if asked == path else None
    with pytest.raises(ConfigError, match=why):
        find_teacher(server.url, probe=server.encode(PROBE), max_tokens=64)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://[::1/v1", "http://127.0.0.1:1/v1ä"])
def test_an_address_without_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be asked: .*start vLLM's server"):
        find_teacher(url, probe=[1], max_tokens=64)


def test_an_address_may_end_with_a_slash(server: Server) -> None:
    found = find_teacher(f"{server.url}/", probe=server.encode(PROBE), max_tokens=64)
    assert found == Teacher(url=server.url, model="large")
