"""`slipstream fit sft`, `dpo`, `reward`, `prm`: train a model on conversations, in one process or one per rank."""

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.common.config.config import Config, dump_config
from slipstream.common.config.env_config import TOOLS
from slipstream.common.process.config_error import ConfigError
from slipstream.common.process.log import log_to_stderr
from slipstream.common.process.output import write_json, write_whole
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.run_state import training
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.rows.row_source import is_hub
from slipstream.common.text.dialogue import Tokeniser
from slipstream.common.text.pieces import check_words
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.data.fit_rows import Sample, described, read_samples
from slipstream.tools.run.check_input import check_model_folder
from slipstream.tools.run.train import RANK_TIMEOUT_S, become_ranks, leads
from slipstream.tools.terminal.options import as_arguments

if TYPE_CHECKING:
    from slipstream.learner.batch.examples import Example, Goal

log = logging.getLogger(__name__)


def fit_model(config: Config, *, goal: "Goal", options: FitOptions) -> int:
    """Train and export the model; return the exit code.

    0: the model is exported. 75 or 130: stopped by a signal, after a checkpoint.
    """
    log_to_stderr()
    run_dir = RunDir(config.run.root, config.run.name)
    with run_dir.held() if leads(config) else contextlib.nullcontext():
        return _fit_model(config, run_dir, goal=goal, options=options)


def _fit_model(config: Config, run_dir: RunDir, *, goal: "Goal", options: FitOptions) -> int:
    shutdown = Shutdown()
    with shutdown.nothing_to_lose():
        trained, held_out, left_out = read_samples(options, goal=goal)
        examples = cache(lambda: _examples(config, goal, (trained, held_out), left_out, data=options.data))
        prepare = partial(_prepare, config, run_dir, options, goal=goal, examples=examples)
        become_ranks(f"fit {goal}", config, run_dir, *as_arguments(options), prepare=prepare)
        parts = examples()
    if leads(config):
        for reason, number in left_out.items():
            if number:
                log.info("%d rows are left out: %s", number, reason)
        log.info("training on %d examples, %d are held out", *map(len, parts))
    return training(run_dir, lambda: _fit(config, run_dir, shutdown, goal, options, parts))


def _fit(
    config: Config, run_dir: RunDir, shutdown: Shutdown, goal: "Goal", options: FitOptions, parts: "list[list[Example]]"
) -> int:
    examples, measured = parts
    with shutdown.nothing_to_lose():
        from slipstream.learner.fit.fit import fit  # after the quick checks, as it imports torch
        from slipstream.learner.ranks.hosts import check_hosts
        from slipstream.learner.ranks.ranks import join_ranks, leave_ranks

        ranks = join_ranks(timeout_s=RANK_TIMEOUT_S, context_ranks=config.learner.context_ranks)
    try:
        check_hosts(config, run_dir, ranks=ranks)
        finished = fit(
            goal, examples, measured, config=config, options=options, run_dir=run_dir, ranks=ranks, shutdown=shutdown
        )
    finally:
        leave_ranks()
    if finished and ranks.rank == 0:
        print(run_dir.trained_model)
    return 0 if finished else shutdown.stopped_code


def _check(config: Config, run_dir: RunDir) -> None:
    """Raise ConfigError unless the model can be trained on conversations, in a directory that is free for that."""
    if not config.model.path:
        raise ConfigError("`model.path` is empty; name the Hugging Face model folder that training begins with")
    if config.model.context == "summary":
        raise ConfigError(
            "`model.context` summary is not possible here: a recorded conversation has no summaries of the policy's; "
            "leave it out"
        )
    check_model_folder(Path(config.model.path), max_tokens=config.model.max_tokens)
    if run_dir.config.exists() and not run_dir.fit.exists():
        raise ConfigError(
            f"`run.name` {config.run.name} is a run of another kind, in {run_dir.path}; choose another run.name"
        )


def _prepare(
    config: Config, run_dir: RunDir, options: FitOptions, *, goal: "Goal", examples: "Callable[[], list[list[Example]]]"
) -> None:
    """Write what the run depends on. Raises ConfigError if it was started with other examples or settings."""
    _check(config, run_dir)
    trained, _ = examples()
    # after the quick checks, as it imports torch
    from slipstream.learner.fit.fit_identity import check_recorded, identity_of

    identity = identity_of(goal, trained, options, config=config)
    check_recorded(run_dir.fit, identity)
    run_dir.create()
    write_json(run_dir.fit, identity)  # before the configuration, without which it is no run of another kind
    write_whole(run_dir.config, dump_config(config))


def _examples(
    config: Config, goal: "Goal", parts: Sequence[Sequence[Sample]], left_out: Counter[str], *, data: str
) -> "list[list[Example]]":
    """Tokenise the samples of each part. Raises ConfigError if no sample of the first part is left."""
    from slipstream.learner.batch.examples import longest
    from slipstream.tools.run.prepare import load_tokenizer  # it imports transformers

    tokenizer = load_tokenizer(Path(config.model.path), config.model)
    tokeniser = Tokeniser(
        tokenizer,
        model=config.model,
        recorded_at_s=None if is_hub(data) else Path(data).stat().st_mtime,  # the same on every rank, and if resumed
    )
    texts = (message.content for sample in parts[0] for side in sample.sides for message in side.messages)
    check_words(tokenizer, texts, where=f"`--data` {data}")
    parts_read = []
    for part in parts:
        if config.env.action_format != TOOLS:  # which the chat template shows then, as in a run
            part = [replace(sample, sides=tuple(map(described, sample.sides))) for sample in part]
        read = [example for sample in part if (example := _example(sample, tokeniser, goal, left_out)) is not None]
        short = [example for example in read if longest(example) <= config.model.max_tokens]
        left_out[f"longer than model.max_tokens, {config.model.max_tokens}"] += len(read) - len(short)
        parts_read.append(short)
    if not parts_read[0]:
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items() if number)
        raise ConfigError(f"`--data` {data} has no row to train on: {why}")
    return parts_read


def _example(sample: Sample, tokeniser: Tokeniser, goal: "Goal", left_out: Counter[str]) -> "Example | None":
    """The tokens of one sample; None if nothing can be learnt from it, which `left_out` counts by reason."""
    from slipstream.learner.batch.examples import example_of

    try:
        sides = [
            tokeniser.branches(
                side.messages, learn_from=side.learn_from, unlearnt=side.unlearnt, tools=json.loads(side.tools)
            )
            for side in sample.sides
        ]
    except ValueError as error:
        left_out[str(error)] += 1
        return None
    example = example_of(sides, goal, labels=dict(sample.sides[0].labels))
    if example is None:
        left_out["no label" if goal == "prm" else "no assistant message to learn from"] += 1
    return example
