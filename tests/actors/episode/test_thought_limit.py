"""Thoughts that are closed after `sampling.max_thought_tokens`: what is recorded, and what the learner computes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from slipstream.actors.engine.engine import Completion
from slipstream.common.config.config import load_config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.records.kept_sets import kept_sets
from slipstream.common.records.trajectory import Sampling, Trajectory
from slipstream.common.text.action_format import FORMATS
from slipstream.common.text.codec import end_tokens
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.learner.batch.pack import pack, sequences_of
from slipstream.learner.model.packed_model import load_model
from slipstream.learner.objective.coherence import check_coherence
from slipstream.learner.ranks.ranks import Ranks
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, completion_of, engine_of, ids, play
from tests.common.text.small_tokenizer import CHATML, END, byte_tokenizer
from tests.tools.run.tiny_model import FLOAT32, save_tiny_model

OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
LIMITED = replace(ALLOWANCE, max_turns=2, max_tokens=2000, max_thought_tokens=20)


def episode_of(write: Callable[[str], str], *, template: str = CHATML, room: int = 200) -> Trajectory:
    """One byte is one token; `write` continues what is after the last mark of an assistant."""
    tokenizer = byte_tokenizer(template)

    def script(tokens: list[int], seed: int | None) -> list[int]:
        return ids(tokenizer, write(tokenizer.decode(tokens).rpartition("<|im_start|>assistant\n")[2]))

    settings = {"tokenizer": tokenizer, "action_format": FORMATS["action_tag"], "allowance": LIMITED}
    return play(ShopEnv(), engine_of(script, max_tokens=2000), attempt=attempt_on(max_turn_tokens=room), **settings)


def turns_of(episode: Trajectory, *, template: str = CHATML) -> list[str]:
    tokens = episode.token_array()
    return [byte_tokenizer(template).decode(tokens[turn.start : turn.stop]) for turn in episode.turns]


def forced(episode: Trajectory) -> list[int]:
    """The number of tokens in the kept set of each sampled token."""
    count = int(episode.loss_mask_array().sum())
    return [0] * count if episode.kept is None else episode.kept.count_array().tolist()


ACTION = f"<action>search[red]</action>{END}"


def endless(opening: str) -> Callable[[str], str]:
    return lambda written: ACTION if "</think>" in written else f"{opening}{'x' * 500}"


@pytest.mark.parametrize(("template", "opening"), [(CHATML, "<think>"), (OPENS, "")], ids=["the reply", "the prompt"])
def test_an_endless_thought_is_closed_and_its_answer_follows(template: str, opening: str) -> None:
    episode = episode_of(endless(opening), template=template)
    said = (opening + "x" * 500)[:20] + "</think>" + ACTION
    assert turns_of(episode, template=template) == [said, said]
    assert episode.turns[0].valid_action
    assert forced(episode) == 2 * ([0] * 20 + [1] * len("</think>") + [0] * len(ids(byte_tokenizer(CHATML), ACTION)))
    logprobs = episode.behaviour_logprob_array()[episode.loss_mask_array()]
    assert not logprobs[np.array(forced(episode)) == 1].any()


@pytest.mark.parametrize("reply", [ACTION, f"no thought, but many words {ACTION}", f"<think>short</think>{ACTION}"])
def test_nothing_is_put_into_a_reply_that_is_not_in_a_thought(reply: str) -> None:
    episode = episode_of(lambda written: reply[len(written) :])
    assert turns_of(episode) == [reply, reply] and not any(forced(episode))


def test_of_a_mark_that_the_policy_has_begun_the_rest_is_put_there() -> None:
    reply = f"<think>1234567</think>{ACTION}"
    episode = episode_of(lambda written: reply[len(written) :])
    assert turns_of(episode) == [reply, reply]
    assert sum(forced(episode)) == 2 * len("k>"), "20 tokens are <think>1234567</thin"


def test_a_thought_whose_mark_leaves_no_room_for_an_answer_is_cut_off() -> None:
    episode = episode_of(endless("<think>"), room=27)
    assert turns_of(episode) == ["<think>xxxxxxxxxxxxx</think"] * 2
    assert [turn.finish_reason for turn in episode.turns] == ["length", "length"]
    assert not any(turn.valid_action for turn in episode.turns)


class Policy:
    """A tiny model as the engine."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._ends = model, end_tokens(tokenizer)
        self.seeds = list[int]()  # of its generations

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int | None = None) -> Completion:
        assert seed is not None
        self.seeds.append(seed)
        chance, written, logprobs = torch.Generator().manual_seed(seed), list[int](), list[float]()
        while len(written) < sampling.max_turn_tokens and not self._ends.intersection(written):
            with torch.no_grad():
                logits = self._model(torch.tensor([tokens + written])).logits[0, -1].double()
            probabilities = logits.softmax(-1)
            written.append(int(torch.multinomial(probabilities, 1, generator=chance)))
            logprobs.append(float(probabilities[written[-1]].log()))
        return completion_of(written, logprobs, finish_reason="stop" if written[-1] in self._ends else "length")


def test_the_learner_computes_the_recorded_logprobs_and_learns_no_mark(tmp_path: Path, ranks: Ranks) -> None:
    tokenizer = byte_tokenizer(OPENS)
    save_tiny_model(tmp_path, vocab_size=len(tokenizer))
    model = load_model(tmp_path, ranks=ranks, settings=FLOAT32)
    policy = Policy(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tokenizer)
    attempt, allowance = attempt_on(max_turn_tokens=40), replace(LIMITED, max_tokens=512)
    episode = play(ShopEnv(), policy, attempt=attempt, tokenizer=tokenizer, allowance=allowance)
    assert len(set(policy.seeds)) == len(policy.seeds) == 4
    # Each branch by itself: a pack would sort them.
    found = torch.cat([model(pack([each])).logprobs for each in sequences_of(episode, advantage=1.0)])
    recorded = episode.behaviour_logprob_array()[episode.loss_mask_array()]
    np.testing.assert_allclose(found.detach().numpy(), recorded, atol=2e-5, rtol=0)
    marks = torch.tensor(forced(episode)) == 1
    assert marks.sum() == 2 * len("</think>")
    (gradient,) = torch.autograd.grad(found[marks].sum(), [next(model.parameters())])
    assert not gradient.any()


def test_kept_sets_of_a_run_with_top_k_stay_beside_those_of_the_mark() -> None:
    first = completion_of([5, 6], [-1.0, -1.0], kept=kept_sets([[5, 7], [6, 8]]), finish_reason="length")
    both = first.then(replace(first, tokens=[9], logprobs=[0.0], kept=kept_sets([[9]]), version_spans=[]))
    assert both.kept == kept_sets([[5, 7], [6, 8], [9]])
    assert both.first(1, finish_reason="stop").kept == kept_sets([[5, 7]])


def test_a_teacher_behind_a_url_knows_no_closed_thought() -> None:
    teacher = ["objective.reference_model=http://127.0.0.1:1", "objective.kl_place=reward"]
    config = load_config(None, [*teacher, "objective.kl_coefficient=0.1", "sampling.max_thought_tokens=8"])
    with pytest.raises(ConfigError, match=r"`sampling\.max_thought_tokens` must be 0 with a URL"):
        check_coherence(config)
