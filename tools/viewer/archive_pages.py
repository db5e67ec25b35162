"""What the viewer shows of a run, as JSON values by path: the run, a step, a group, an episode.

    run    steps/12    steps/12/groups/345    steps/12/groups/345/members/6

One step is read at a time, so a run of any length can be looked into.
"""

import re
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.common.config.config import Config
from slipstream.common.process.metrics import metrics_of_steps
from slipstream.common.process.run_dir import RunDir
from slipstream.common.process.wire import WireError
from slipstream.common.records.trajectory import Trajectory
from slipstream.common.records.version_lag import lags
from slipstream.replay.buffer.listing import NotRecorded
from slipstream.replay.records.step_tokens import read_tokens
from slipstream.replay.records.ticket import Group
from slipstream.replay.run.archive import Archive, ArchivedStep
from slipstream.tools.replay.run_records import ARCHIVED, read_archived, transcriber_of
from slipstream.tools.replay.show import member_facts, trajectory_facts
from slipstream.tools.replay.trajectory_rows import row_of
from slipstream.tools.run.prepare import model_folder
from slipstream.tools.see.metrics_window import numbers
from slipstream.tools.viewer.marks import Mark, keep_mark, marked_rows

MAX_HITS = 50  # of one search
SEARCH_S = 2.0  # then the search returns what it has found, and where it stopped
EXCERPT_CHARS = 80  # on each side of a hit
SHOWN_METRICS = ("trained/reward", "trained/success", "produced/success", "lag/mean")
STEPS_A_PAGE = 50
_METRICS = re.compile(r"metrics/(\d{1,9})")
_PATH = re.compile(r"run|steps/(\d{1,9})(?:/groups/(\d{1,15})(?:/members/(\d{1,4}))?)?")


class ArchivePages:
    """Reads the archive of one run."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        """Raises ConfigError if the model's tokenizer is missing, NotRecorded if no step is archived."""
        self._config = config
        self._run_dir = run_dir
        self._archive = Archive(run_dir.trajectories, config.run.name)
        if not self._archive.steps:
            why = "the run has made no step yet" if config.replay.archive else "the run has `replay.archive=false`"
            raise NotRecorded(f"{run_dir.trajectories} has no step: {why}")
        self._transcriber = transcriber_of(model_folder(config, run_dir), config.model)
        self._read: ArchivedStep | None = None  # the last one

    @property
    def steps(self) -> list[int]:
        """The archived steps, in order."""
        return self._archive.steps

    def page(self, path: str) -> dict[str, Any]:
        """The values at `path`, without numbers that JSON does not have. Raises NotRecorded."""
        # msgspec writes null for a number that is not finite: an actor may have recorded such a duration.
        return msgspec.json.decode(msgspec.json.encode(self._page(path)), type=dict[str, Any])

    def _page(self, path: str) -> dict[str, Any]:
        if newest := _METRICS.fullmatch(path):
            return self._metrics([step for step in self.steps if step <= int(newest[1])][-STEPS_A_PAGE:])
        found = _PATH.fullmatch(path)
        if found is None:
            raise NotRecorded(f"there is no page {path!r}")
        step, group, member = (None if number is None else int(number) for number in found.groups())
        if step is None:
            self._archive.refresh()  # a running run has made more steps
            return self.run(self.steps)
        archived = self._step(step)
        if group is None:
            return self._step_page(archived)
        held = _group(archived, group)
        return self._group_page(held, archived) if member is None else self._episode_page(_of(held, member), archived)

    def run(self, steps: Sequence[int]) -> dict[str, Any]:
        """The run, whose archive has `steps`."""
        return {
            "name": self._run_dir.path.name,
            "env": ", ".join(self._config.env.entries()),
            "max_lag": self._config.replay.max_lag,
            "steps": list(steps),
        }

    def _metrics(self, steps: Sequence[int]) -> dict[str, Any]:
        """The numbers of `steps`, by step."""
        found = metrics_of_steps(self._run_dir.metrics, min(steps, default=0), max(steps, default=0))
        shown = {str(step): numbers(found.get(step, {})) for step in steps}
        return {step: {name: record.get(name) for name in SHOWN_METRICS} for step, record in shown.items()}

    def search(self, text: str, *, before: int) -> dict[str, Any]:
        """Where `text` occurs in the steps before `before`, newest first, and where the next search has to begin."""
        hits, unreadable, ends_at = list[dict[str, Any]](), list[int](), time.monotonic() + SEARCH_S
        earlier, following = [step for step in reversed(self.steps) if step < before], None
        for place, step in enumerate(earlier):
            if len(hits) >= MAX_HITS or time.monotonic() > ends_at:
                following = earlier[place - 1]  # the last one that was read
                break
            try:
                groups = self._step(step).groups
            except NotRecorded:
                unreadable.append(step)
                continue
            for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
                hits += self._hits(trajectory, text.casefold(), step)
        return {"hits": hits, "unreadable": unreadable, "next": following}

    def mark(self, mark: Mark) -> dict[str, Any]:
        """Keep a person's mark; return the marks of its group. Raises NotRecorded, ConfigError."""
        group = _group(self._step(mark.step), mark.group_id)
        better, worse = (
            row_of(_of(group, member), self._transcriber, state=ARCHIVED, step=mark.step)
            for member in (mark.better, mark.worse)
        )
        if not better["messages"] or not worse["messages"]:
            raise NotRecorded("the messages of these episodes are not known, so nothing can be learned from a mark")
        row = {name: better[name] for name in ("run_id", "task", "group_id", "step")}
        sides = {"chosen": better["messages"], "rejected": worse["messages"], "member": [mark.better, mark.worse]}
        keep_mark(self._run_dir.preferences, mark, row | sides)
        return {"marks": self._marks(mark.group_id)}

    def _marks(self, group_id: int) -> list[list[int]]:
        """The pairs of members of a group of which people prefer the first."""
        rows = [row for row in marked_rows(self._run_dir.preferences) if row.get("group_id") == group_id]
        return [row["member"] for row in rows if isinstance(row.get("member"), list)]

    def _step(self, step: int) -> ArchivedStep:
        if self._read is None or self._read.step != step:
            self._read = read_archived(self._archive, step)
        return self._read

    def _step_page(self, archived: ArchivedStep) -> dict[str, Any]:
        groups = []
        for group in archived.groups:
            members = [_member(trajectory, archived) for trajectory in group.trajectories]
            groups.append(_group_facts(group, archived) | {"members": members})
        return {"facts": _step_facts(archived), "groups": groups}

    def _group_page(self, group: Group, archived: ArchivedStep) -> dict[str, Any]:
        members = []
        for trajectory in group.trajectories:
            facts = trajectory_facts(trajectory, self._transcriber.turns(trajectory))
            members.append(_member(trajectory, archived) | {"turns": facts["turns"]})
        return _group_facts(group, archived) | {"members": members, "marks": self._marks(group.ticket.group_id)}

    def _episode_page(self, trajectory: Trajectory, archived: ArchivedStep) -> dict[str, Any]:
        facts = trajectory_facts(trajectory, self._transcriber.turns(trajectory)) | _member(trajectory, archived)
        logprobs, versions = trajectory.behaviour_logprob_array(), trajectory.policy_version_array()
        try:
            loss, note = self._loss_of(trajectory, archived), ""
        except (WireError, OSError, NotRecorded) as error:
            loss, note = {}, str(error)
        for shown, turn in zip(facts["turns"], trajectory.turns, strict=True):
            of_loss = {name: values[turn.start : turn.stop] for name, values in loss.items()}
            shown["tokens"] = {
                "texts": self._transcriber.pieces(trajectory, turn.start, turn.stop),
                "logprobs": [round(value, 4) for value in logprobs[turn.start : turn.stop].tolist()],
                "versions": versions[turn.start : turn.stop].tolist(),
            } | {name: values.tolist() for name, values in of_loss.items() if not np.isnan(values).any()}
        sampled = {span.policy_version for span in trajectory.version_spans}
        by_version = {str(version): _lag_of(version, archived) for version in sorted(sampled)}
        return facts | {"lags": by_version, "has_loss": bool(loss), "loss_note": note}

    def _loss_of(self, trajectory: Trajectory, archived: ArchivedStep) -> dict[str, npt.NDArray[np.float32]]:
        """What the loss made of each token: NaN in one that was trained in another attempt, or is not recorded.

        Raises NotRecorded, WireError and OSError if no token is.
        """
        by_member = read_tokens(self._run_dir.tokens, step=archived.step, policy_version=archived.policy_version)
        parts = by_member.get((trajectory.group_id, trajectory.member), ())
        sampled = trajectory.loss_mask_array().nonzero()[0]
        if not parts or any(part.first + len(part.fates) > len(sampled) for part in parts):
            raise NotRecorded("what the loss made of this episode's tokens is not recorded")
        values = {
            name: np.full(trajectory.num_tokens, np.nan, np.float32) for name in ("advantages", "ratios", "fates")
        }
        for part in parts:
            places = sampled[part.first : part.first + len(part.fates)]
            values["advantages"][places] = np.frombuffer(part.advantages, np.float16)
            values["ratios"][places] = np.frombuffer(part.ratios, np.float16)
            values["fates"][places] = np.frombuffer(part.fates, np.uint8)
        return values

    def _hits(self, trajectory: Trajectory, text: str, step: int) -> list[dict[str, Any]]:
        """The first occurrence in each turn, of what the policy wrote or else of what it read."""
        hits = []
        for index, turn in enumerate(self._transcriber.turns(trajectory)):
            for where, words in (("action", turn.action), ("prompt", turn.prompt)):
                at = words.casefold().find(text)
                if at >= 0:
                    excerpt = words[max(0, at - EXCERPT_CHARS) : at + len(text) + EXCERPT_CHARS]
                    place = {"step": step, "group_id": trajectory.group_id, "member": trajectory.member}
                    hits.append(place | {"turn": index, "where": where, "excerpt": excerpt})
                    break
        return hits


def _group(archived: ArchivedStep, group_id: int) -> Group:
    found = next((each for each in archived.groups if each.ticket.group_id == group_id), None)
    if found is None:
        raise NotRecorded(f"step {archived.step} was not trained on group {group_id}")
    return found


def _of(group: Group, member: int) -> Trajectory:
    if not 0 <= member < len(group.trajectories):
        raise NotRecorded(f"group {group.ticket.group_id} has no member {member}")
    return group.trajectories[member]


def _member(trajectory: Trajectory, archived: ArchivedStep) -> dict[str, Any]:
    """One line about an episode: its facts, its lag, and its reward by part."""
    parts: dict[str, float] = {}
    for turn in trajectory.turns:
        for name, reward in turn.rewards.items():
            parts[name] = parts.get(name, 0.0) + reward
    return member_facts(trajectory) | {
        "lag": _lag_of(trajectory.oldest_policy_version, archived),
        "rewards": parts,
        "duration_s": trajectory.duration_s,
    }


def _step_facts(archived: ArchivedStep) -> dict[str, Any]:
    """One step in numbers. Shares are of turns, lengths in sampled tokens, log-probabilities means per token."""
    trajectories = [trajectory for group in archived.groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    sampled = sum(turn.stop - turn.start for turn in turns)
    of_groups = [_group_facts(group, archived)["lag"] for group in archived.groups]
    return {
        "policy_version": archived.policy_version,
        "num_groups": len(archived.groups),
        "num_trajectories": len(trajectories),
        "trained_reward": fmean(trajectory.total_reward for trajectory in trajectories),
        "trained_success": fmean(trajectory.success for trajectory in trajectories),
        "lag_mean": fmean(of_groups),
        "lag_max": max(of_groups),
        "turns_mean": len(turns) / len(trajectories),
        "sampled_tokens_mean": sampled / len(trajectories),
        "valid_actions": fmean(turn.valid_action for turn in turns),
        "cut_by_length": fmean(turn.finish_reason == "length" for turn in turns),
        "logprob_mean": sum(float(t.behaviour_logprob_array().sum()) for t in trajectories) / sampled,
    }


def _group_facts(group: Group, archived: ArchivedStep) -> dict[str, Any]:
    """One group as the learner got it; `lag` is that of the oldest token."""
    oldest = min(trajectory.oldest_policy_version for trajectory in group.trajectories)
    return {
        "group_id": group.ticket.group_id,
        "task": group.ticket.task.task_id,
        "returns": [trajectory.total_reward for trajectory in group.trajectories],
        "lag": _lag_of(oldest, archived),
    }


def _lag_of(version: int, archived: ArchivedStep) -> int:
    """The lag of `version` in optimizer steps."""
    at, resumptions = archived.policy_version, archived.resumptions
    return int(lags(np.array([version], np.int32), policy_version=at, resumptions=resumptions)[0])
