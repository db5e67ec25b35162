"""Mistakes that systems like this one have made in the open, each shown to be impossible or refused here."""

import asyncio
from dataclasses import replace
from itertools import chain

import msgspec
import numpy as np
import pytest

from slipstream.actors.engine.vllm_engine import check_prompt
from slipstream.common.process.wire import WireError, encode
from slipstream.common.records.trajectory import decode_trajectory
from slipstream.envhub.shop.shop import ShopEnv
from slipstream.learner.batch.pack import sequences_of
from tests.actors.episode.episodes import ALLOWANCE, attempt_on, engine_of, expert, ids, play
from tests.common.text.small_tokenizer import CHATML, merging_tokenizer, shop_tokenizer


def test_a_reward_that_is_missing_in_a_message_is_an_error_and_does_not_arrive_as_0() -> None:
    env = ShopEnv()
    episode = play(env, engine_of(expert(env, shop_tokenizer())), attempt=attempt_on(0))
    whole = msgspec.to_builtins(episode, builtin_types=(bytes,))
    del whole["turns"][4]["rewards"]
    nameless = msgspec.defstruct("Nameless", [(name, object) for name in whole])(**whole)
    with pytest.raises(WireError, match=r"missing required field `rewards` - at `\$\.turns\[4\]`"):
        decode_trajectory(encode(nameless), max_bytes=1 << 20, vocab_size=100)


def test_sampled_tokens_reach_the_learner_as_sampled_and_not_as_their_text_would_be_encoded() -> None:
    tokenizer, env = merging_tokenizer(CHATML), ShopEnv()
    prompts: list[list[int]] = []
    written: list[list[int]] = []

    def letter_by_letter(tokens: list[int], seed: int | None) -> list[int]:
        letters = [ids(tokenizer, letter)[0] for letter in env.expert().replace("plain", "ab plain")]
        written.append([*letters, tokenizer.eos_token_id])
        prompts.append(tokens)
        return written[-1]

    engine, allowance = engine_of(letter_by_letter, max_tokens=2048), replace(ALLOWANCE, max_turns=3, max_tokens=2048)
    trajectory = play(env, engine, tokenizer=tokenizer, allowance=allowance)
    (sequence,) = sequences_of(trajectory, advantage=1.0)
    assert sequence.tokens[sequence.loss_mask].tolist() == list(chain.from_iterable(written))
    places = [len(prompt) + place for prompt, turn in zip(prompts, written, strict=True) for place in range(len(turn))]
    assert np.flatnonzero(sequence.loss_mask).tolist() == places, "no token of a prompt is trained"
    assert ids(tokenizer, tokenizer.decode(written[0])) != written[0]  # else this test would show nothing


@pytest.mark.parametrize("tokens", [50, 51])
def test_a_prompt_that_leaves_no_room_is_refused_and_not_cut(tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"prompt of {tokens} tokens.*room for 1 more in `model\.max_tokens` = 50"):
        check_prompt([1] * tokens, max_tokens=50, vocab_size=100)
    with pytest.raises(ValueError, match=r"`model\.max_tokens` = 50"):
        asyncio.run(engine_of(lambda *_: [], max_tokens=50).generate([1] * tokens, attempt_on().sampling))
