"""What a run needs on the host of an actor: its model's folder, its tokenizer, and the code of its environments."""

import logging
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from slipstream.actors.host.model_cache import cached_folder, learners_folder
from slipstream.actors.weights.pull import actors_puller
from slipstream.common.config.config import Config
from slipstream.common.process.config_error import ConfigError
from slipstream.common.text.tokenizer import load_tokenizer, tokenizer_root
from slipstream.envhub.own_modules import SHARED_ROOMS, SLIPSTREAM, file_of, own_modules
from slipstream.envhub.rewards.part import actors_judge, check_keys, reward_parts
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import RunFacts

log = logging.getLogger(__name__)


def model_folder(facts: RunFacts, run: Config, mine: Config, bulletin: Bulletin, *, name: str) -> Path:
    """The folder of the run's model on this host: the learner's own, or one of `slipstream.actors.host.model_cache`."""
    found = learners_folder(facts)
    if found is not None:
        return found
    log.info("the learner's folder %s is not on this host, or differs; pulling what is missing", facts.model_path)
    return cached_folder(
        facts.model_files,
        make_puller=lambda: actors_puller(mine.redis.url, run.run.name, actor=name),
        newest=bulletin.latest,
        timeout_s=mine.actors.join_timeout_s,
    )


def checked_tokenizer(facts: RunFacts, run: Config, folder: Path) -> PreTrainedTokenizerBase:
    """Load the run's tokenizer from `folder` on this host. Raises ConfigError if it differs from the learner's."""
    tokenizer = load_tokenizer(folder, run.model.template_arguments)
    root = tokenizer_root(tokenizer)
    if root != facts.tokenizer_root:
        raise ConfigError(
            f"the tokenizer or the chat template that this host loads from {folder} differs from the learner's: its "
            f"hash is {root}, the learner's is {facts.tokenizer_root}; its files are the learner's: install the same "
            "versions of transformers and tokenizers"
        )
    return tokenizer


def check_environments(run: Config, facts: RunFacts) -> None:
    """Raise ConfigError unless this host can make the run's environments, from the same code as the learner.

    It must also have the keys of the run's judges.
    """
    try:
        mine = own_modules(run.env)
    except ValueError as error:
        raise ConfigError(
            f"this host cannot make the run's environments: {error}; code and data that are not a part of Slipstream "
            "must be on every host of actors: in its image, as a wheel, or in a folder on PYTHONPATH"
        ) from None
    for name, digest in mine.items():
        if facts.own_modules.get(name, digest) == digest:
            continue
        if name == SLIPSTREAM:
            raise ConfigError(
                f"the code of Slipstream on this host differs from the learner's: {', '.join(SHARED_ROOMS)} have the "
                f"digest {digest}, the learner's {facts.own_modules[name]}; install the learner's version on this host"
            )
        raise ConfigError(
            f"the module {name} on this host, {file_of(name)}, differs from the learner's; copy the learner's file "
            "to this host, or give both the same image or wheel"
        )
    parts = reward_parts(run.env.entries())
    check_keys(parts)
    if actors_judge(parts.values()):
        check_keys(parts, of_groups=True)
