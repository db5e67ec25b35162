"""A conversation that is written down becomes the tokens that an actor would have recorded in it."""

import pytest

from slipstream.common.config.config import load_config
from slipstream.common.records.message import Message
from slipstream.common.text.dialogue import Tokeniser
from slipstream.common.text.transcript import Fidelity, Transcriber
from slipstream.tools.run.prepare import demonstrate
from tests.common.text.small_tokenizer import shop_tokenizer


def test_the_messages_of_recorded_episodes_become_their_very_tokens() -> None:
    config = load_config("conf/quickstart.yaml", ["warm_start.episodes=20", "warm_start.noise=0.3"])
    tokeniser, transcriber = Tokeniser(shop_tokenizer()), Transcriber(shop_tokenizer())
    num_turns = 0
    for episode in demonstrate(config, shop_tokenizer()):
        read = transcriber.read(episode)
        assert read.fidelity is Fidelity.TOKENS
        (branch,) = tokeniser.branches(read.messages)
        assert branch.tokens == episode.token_array().tolist()
        assert branch.loss_mask == episode.loss_mask_array().tolist()
        num_turns += len(episode.turns)
    assert num_turns > 40


def said(*texts: str) -> list[Message]:
    """A user and an assistant, by turns."""
    return [Message(role=("user", "assistant")[place % 2], content=text) for place, text in enumerate(texts)]


def test_only_what_is_asked_for_is_learnt_and_ends_with_its_end_of_turn() -> None:
    tokenizer = shop_tokenizer()
    (branch,) = Tokeniser(tokenizer).branches(said("find", "search", "shirt", "click", "hat"), learn_from=2)
    learnt = [token for token, mask in zip(branch.tokens, branch.loss_mask, strict=True) if mask]
    assert tokenizer.decode(learnt).split() == ["click", tokenizer.eos_token]
    assert "hat" not in tokenizer.decode(branch.tokens)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (said("find"), "no message is the assistant's"),
        (said("find", "search")[1:], "the first message is the assistant's"),
        ([], "no message is the assistant's"),
    ],
)
def test_what_no_policy_could_have_said_is_refused(messages: list[Message], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Tokeniser(shop_tokenizer()).branches(messages)
