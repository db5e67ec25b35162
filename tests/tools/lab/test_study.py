"""The in-process sampler says what it sampled, and a study's lag is the one that it names."""

import asyncio
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.actors.engine.engine import Completion, Sampler
from slipstream.common.config.config import load_config
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.shutdown import Shutdown
from slipstream.common.records.trajectory import Sampling
from slipstream.learner.batch.pack import TokenSequence, pack
from slipstream.learner.checkpoint.conditions import conditions_of
from slipstream.learner.model.packed_model import load_model
from slipstream.learner.model.weight_shards import full_tensors
from slipstream.learner.objective.ratio import Sequences
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.rerun import train_again
from slipstream.replay.records.step_tokens import read_tokens
from slipstream.replay.run.archive import Archive, ArchivedStep, ArchiveWriter
from slipstream.tools.lab.study import lag as study_lag
from slipstream.tools.lab.study.lag_arms import delay_gradients, second_moment
from slipstream.tools.lab.study.page import delay
from slipstream.tools.lab.study.plot import Line, Point, svg
from slipstream.tools.lab.study.run import StudyStep, practice
from slipstream.tools.lab.study.sampler import LockstepSampler, choose
from slipstream.tools.run.prepare import prepare
from tests.processes import GUESS, REPOSITORY
from tests.tools.run.tiny_model import FLOAT32, VOCAB_SIZE, save_tiny_model

SAMPLING = Sampling(temperature=0.7, top_p=1.0, top_k=0, max_turn_tokens=6)
Episode = list[tuple[list[int], Completion]]  # what each turn's prompt was, and what was sampled


def test_a_chance_falls_into_the_part_of_its_token() -> None:
    logits = torch.tensor([[0.0, math.log(3)]] * 4)
    chosen = choose(logits, torch.tensor([0.0, 0.2, 0.3, 0.999999], dtype=torch.float64))
    assert chosen.tokens.tolist() == [0, 0, 1, 1]
    assert chosen.logprobs.exp().tolist() == pytest.approx([0.25, 0.25, 0.75, 0.75])


def test_recorded_logprobs_are_the_learners_for_episodes_of_many_turns(ranks: Ranks, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    sampler = LockstepSampler(folder, num_slots=3, max_tokens=64, end_token=7)
    episodes = asyncio.run(three_episodes(sampler))
    model = load_model(folder, ranks=ranks, settings=dataclasses.replace(FLOAT32, temperature=SAMPLING.temperature))
    for episode in episodes:
        prompt, completion = episode[-1]
        tokens = np.array(prompt + completion.tokens, dtype=np.int32)
        recorded, sampled = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.bool_)
        for begun, turn in episode:
            recorded[len(begun) : len(begun) + len(turn.tokens)] = turn.logprobs
            sampled[len(begun) : len(begun) + len(turn.tokens)] = True
        packed = pack([dataclasses.replace(TokenSequence.bare(tokens, sampled), behaviour_logprobs=recorded)])
        with torch.no_grad():
            again = model(packed).logprobs
        assert float((again - packed.behaviour_logprobs[packed.loss_mask]).abs().max()) < 1e-4


async def three_episodes(sampler: LockstepSampler) -> list[Episode]:
    """Episodes of 3, 2 and 1 turns: two continue after one has ended, and prompts have different lengths."""

    async def play(number: int) -> Episode:
        episode: Episode = []
        prompt = [11 + number] * (2 + 5 * number)
        with sampler.seat() as seat:
            for turn in range(3 - number):
                completion = await seat.generate(prompt, SAMPLING, seed=10 * number + turn)
                episode.append((prompt, completion))
                prompt = [*prompt, *completion.tokens, 21, 22 + number, *[23] * turn]
        return episode

    return list(await asyncio.gather(*(play(number) for number in range(3))))


async def test_a_seed_samples_the_same_whoever_sits_beside_it(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    together = await three_episodes(LockstepSampler(folder, num_slots=3, max_tokens=64, end_token=7))
    with LockstepSampler(folder, num_slots=1, max_tokens=64, end_token=7).seat() as seat:
        found = await seat.generate([11, 11], SAMPLING, seed=0)
    assert found.tokens == together[0][0][1].tokens


async def test_a_turn_ends_at_its_end_token_at_its_limit_and_at_the_context(tmp_path: Path) -> None:
    sampler = LockstepSampler(save_tiny_model(tmp_path), num_slots=1, max_tokens=12, end_token=7)

    async def turn(seat: Sampler, num_prompt: int, seed: int) -> Completion:
        return await seat.generate([11] * num_prompt, SAMPLING, seed=seed)

    with sampler.seat() as seat:
        assert [len((await turn(seat, num, 1)).tokens) for num in (6, 7, 11)] == [6, 5, 1]
        with pytest.raises(ValueError, match="leaves no room"):
            await turn(seat, 12, 0)
        completions = [await turn(seat, 4, seed) for seed in range(60)]
        stopped = [each for each in completions if each.finish_reason == "stop"]
        assert stopped and all(each.tokens.index(7) == len(each.tokens) - 1 for each in stopped)
        assert all(7 not in each.tokens for each in completions if each.finish_reason == "length")


async def test_new_weights_are_refused_in_mid_episode(tmp_path: Path) -> None:
    sampler = LockstepSampler(save_tiny_model(tmp_path), num_slots=1, max_tokens=12, end_token=7)
    with sampler.seat(), pytest.raises(ValueError, match="load between episodes"):
        sampler.load({}, 1)


@pytest.fixture(scope="module")
def guess_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config file of a run whose tiny model is made: even at random it earns something."""
    root = tmp_path_factory.mktemp("guess")
    config = load_config(None, [*GUESS, f"run.root={root}", "run.name=guess", "learner.steps=4"])
    config.model.path = str(prepare(config).model)
    file = root / "guess.yaml"
    lines = [
        "env: {name: 'tests.guess:GuessEnv'}",
        f"model: {{path: {config.model.path}, max_tokens: 64}}",
        "sampling: {max_turn_tokens: 4}",
        "learner: {micro_batch_tokens: 256, steps: 3}",
        "replay: {groups_per_step: 4, group_size: 4}",
        "optim: {lr: 1e-3}",
        f"run: {{root: {root}}}",
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def sampled_by(step: StudyStep) -> set[int]:
    return {trajectory.oldest_policy_version for group in step.batch.groups for trajectory in group.trajectories}


@pytest.mark.parametrize("lag", [0, 2])
def test_a_step_learns_from_what_the_learner_was_lag_steps_before(lag: int, guess_run: Path, ranks: Ranks) -> None:
    config = load_config(str(guess_run), [f"run.name=lag{lag}"])
    with asyncio.Runner() as runner:
        practised = practice(config, lag=lag, ranks=ranks, runner=runner)
        steps = [practised.step() for _ in range(4)]
    far = [step.metrics.mismatch_kl > 1e-6 for step in steps]
    assert far == [lag > 0 and step > 0 for step in range(4)]
    assert list(map(sampled_by, steps)) == [{max(0, step - lag)} for step in range(4)]


@pytest.mark.parametrize("preset", sorted((REPOSITORY / "conf/objective").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_trains(preset: Path, guess_run: Path, ranks: Ranks) -> None:
    config = load_config(str(guess_run), [f"run.name={preset.stem}"], presets=[str(preset)])
    with asyncio.Runner() as runner:
        practised = practice(config, lag=1, ranks=ranks, runner=runner)
        learner = practised.learner
        before = {name: tensor.clone() for name, tensor in full_tensors(learner.model)}
        steps = [practised.step() for _ in range(2)]
    for step in steps:
        trained = [trajectory for group in step.batch.groups for trajectory in group.trajectories]
        assert len(trained) == 16
        assert step.metrics.num_loss_tokens == sum(
            int(each.loss_mask_array()[each.own_start :].sum()) for each in trained
        )
        assert math.isfinite(step.metrics.loss) and math.isfinite(step.metrics.grad_norm)
        assert not step.metrics.skipped
    assert learner.progress.step == learner.progress.policy_version == 2
    assert learner.progress.next_group_id == steps[-1].batch.next_group_id
    assert learner.progress.tokens_trained == sum(
        each.num_own_tokens for step in steps for group in step.batch.groups for each in group.trajectories
    )
    assert any(not torch.equal(before[name], tensor) for name, tensor in full_tensors(learner.model))


def test_trees_train_with_a_divergence_in_the_reward_and_the_record_names_the_tokens_that_were_trained(
    guess_run: Path, ranks: Ranks
) -> None:
    settings = ["run.name=trees", "objective.kl_coefficient=0.01", "objective.kl_place=reward"]
    config = load_config(str(guess_run), settings, presets=[str(REPOSITORY / "conf/objective/tree.yaml")])
    with asyncio.Runner() as runner:
        step = practice(config, lag=0, ranks=ranks, runner=runner).step()
    assert math.isfinite(step.metrics.reference_kl)
    recorded = read_tokens(RunDir(config.run.root, "trees").tokens, step=1, policy_version=0)
    members = [member for group in step.batch.groups for member in group.trajectories]
    assert any(member.fork for member in members)
    for member in members:
        (part,) = recorded[member.group_id, member.member]
        sampled = member.loss_mask_array()
        assert part.first == int(sampled[: member.own_start].sum())
        assert len(part.fates) == int(sampled[member.own_start :].sum())


def test_a_search_is_trained_again_from_an_archive_to_the_same_bits(guess_run: Path, ranks: Ranks) -> None:
    settings = ["replay.trees=tree_of_thoughts:2", "learner.steps=2"]
    presets = [str(REPOSITORY / "conf/objective/tree.yaml")]
    config = load_config(str(guess_run), [*settings, "run.name=searched"], presets=presets)
    archived = RunDir(config.run.root, "searched").trajectories
    writer = ArchiveWriter(archived, "searched", epoch=1)
    with asyncio.Runner() as runner:
        practised = practice(config, lag=0, ranks=ranks, runner=runner)
        for number in (1, 2):
            groups = practised.step().batch.groups
            assert any(member.fork for group in groups for member in group.trajectories)
            conditions = conditions_of(config, ranks=ranks)
            writer.append(
                ArchivedStep(
                    step=number, policy_version=number - 1, resumptions=(), conditions=conditions, groups=groups
                )
            )
    again = load_config(str(guess_run), [*settings, "run.name=again"], presets=presets)
    folder = RunDir(again.run.root, "again")
    assert train_again(again, folder, Archive(archived, "searched"), Path(), ranks=ranks, shutdown=Shutdown())
    found, expected = load_file(folder.trained_model / "model.safetensors"), full_tensors(practised.learner.model)
    assert found.keys() <= (names := dict(expected)).keys()
    assert all(torch.equal(tensor, names[name]) for name, tensor in found.items())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_short_study_of_lag_writes_its_page_and_runs_nothing_twice(guess_run: Path, tmp_path: Path) -> None:
    arguments = ["--task", str(guess_run), "--folder", str(tmp_path), "--docs", str(tmp_path / "docs")]
    arguments += ["--arms", "default", "tv_narrow", "--lags", "0", "2", "--seeds", "0", "--workers", "1"]
    arguments += ["learner.steps=2", "eval.num_tasks=4", "warm_start.episodes=4", "warm_start.batch_tokens=64"]
    study_lag.main(arguments)
    study = json.loads((tmp_path / "docs/lag.json").read_text())
    found = [(result["arm"], result["lag"], len(result["success"])) for result in study["results"]]
    assert found == [("default", 0, 2), ("tv_narrow", 0, 2), ("default", 2, 2), ("tv_narrow", 2, 2)]
    assert "| tv_narrow |" in (tmp_path / "docs/lag.md").read_text()
    kept = tmp_path / "default-lag0-seed0.json"
    kept.write_text(kept.read_text().replace('"seed":0', '"seed":99'))
    study_lag.main(arguments)
    assert json.loads((tmp_path / "docs/lag.json").read_text())["results"][0]["seed"] == 99


def test_a_delay_is_what_the_last_steps_are_above_those_before_the_lag() -> None:
    rising = [step / 100 for step in range(100)]
    assert delay(rising, 16) == pytest.approx(0.16)
    assert delay(rising, 256) == pytest.approx(0.8)  # the first steps are the earliest
    assert delay([0.5] * 10, 4) == 0


def test_a_late_gradient_is_applied_after_its_delay() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, seen = torch.optim.SGD([weight], lr=1.0), []
    delay_gradients(optimizer, 2)
    for gradient in (1.0, 10.0, 100.0, 1000.0):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append(float(weight.detach()))
    assert seen == [0.0, 0.0, -1.0, -11.0]


def test_m2po_leaves_out_the_tokens_that_are_furthest_off_until_the_mean_square_is_small_enough() -> None:
    # Squares of 0.0361 (twice), 0.09 and 1: the mean of the first three is 0.054, so the one of 0.09 goes as well.
    current = torch.tensor([-0.19, 1.0, 0.19, -0.3])
    sequences = Sequences(
        ids=torch.zeros(4, dtype=torch.long), num=1, trajectories=torch.tensor([0]), trajectory_tokens=torch.tensor([4])
    )
    made = second_moment(current, behaviour_logprobs=torch.zeros(4), advantages=torch.ones(4), sequences=sequences)
    assert made.masked.tolist() == [False, True, False, True]
    assert made.weights[[0, 2]].tolist() == pytest.approx([0.826959, 1.209250])


def test_a_plot_has_a_line_for_each_arm_and_a_whisker_for_each_point() -> None:
    points = [Point(column=0, value=0.5, deviation=0.1), Point(column=1, value=0.25, deviation=0.0)]
    drawn = svg([Line(name="a <b>", points=points)], columns=["0", "16"], across="lag", upwards="success")
    # 340 pixels for a fraction of 1, from 30 down; two columns of 255 from 60 on.
    assert 'points="187.5,200.0 442.5,285.0"' in drawn
    assert "M187.5 234.0V166.0" in drawn and "a &lt;b&gt;" in drawn


assert VOCAB_SIZE > 23  # the tokens of these tests' prompts
