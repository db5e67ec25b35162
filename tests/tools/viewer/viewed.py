"""A run on disk for tests of `slipstream view`: two archived steps of conversations, and their tokenizer."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.message import Message
from slipstream.common.records.trajectory import Trajectory, VersionSpan
from slipstream.common.records.version_lag import Resumption
from slipstream.replay.records.step_tokens import CLIPPED, LEFT_OUT, TRAINED, SequenceTokens, StepTokens, write_tokens
from slipstream.replay.records.ticket import Group
from slipstream.replay.run.archive import ArchivedStep, ArchiveWriter
from tests.actors.episode.spoken import spoken
from tests.common.text.small_tokenizer import CHATML, END, byte_tokenizer
from tests.replay.records.attempts import ticket

ASK = Message("user", "find plain dress")
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</script><!--\x1b[2J\u202etxt\u2028 \U0001f600"
)


def make_viewed_run(root: Path, *, name: str = "seen", heard: str = "red small") -> RunDir:
    """Step 6 was trained on groups 1 and 2, step 7 on group 3; the members of group 1 earn 0 and 1.

    What the loss made of the tokens is recorded of the second member of group 1 alone.
    """
    run_dir = RunDir(root, name)
    run_dir.create()
    run_dir.config.write_text(f"run: {{name: {name}, root: '{root}'}}\nreplay: {{max_lag: 2}}\n")
    byte_tokenizer(CHATML).save_pretrained(run_dir.model)
    writer = ArchiveWriter(run_dir.trajectories, name, epoch=1)
    writer.append(archived(6, group_of(1, name, heard=heard), group_of(2, name, heard=heard)))
    writer.append(archived(7, group_of(3, name, heard=heard)))
    write_tokens(run_dir.tokens, tokens_of(group_of(1, name, heard=heard).trajectories[1]), step=6, rank=0)
    numbers = {"lag/mean": 1.5, "trained/success": 0.5, "produced/success": None}
    records = [{"step": 6, "trained/reward": 0.25} | numbers, {"step": 7, "trained/reward": None} | numbers]
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run_dir


def tokens_of(trajectory: Trajectory) -> StepTokens:
    """The first token was clipped, the last left out; the ratio of the others is 1.25, and every advantage 0.5."""
    count = int(trajectory.loss_mask_array().sum())
    place: dict[str, Any] = {"group_id": trajectory.group_id, "member": trajectory.member, "first": 0}
    advantages = np.full(count, 0.5, np.float16).tobytes()
    ratios = np.array([2.0, *[1.25] * (count - 2), 0.5], np.float16).tobytes()
    fates = bytes([CLIPPED, *[TRAINED] * (count - 2), LEFT_OUT])
    sequence = SequenceTokens(**place, advantages=advantages, ratios=ratios, fates=fates)
    return StepTokens(policy_version=8, sequences=[sequence])


def archived(number: int, *groups: Group) -> ArchivedStep:
    came_back = Resumption(checkpoint_version=4, first_version=7)  # so version 4 and 7 have the same weights
    return ArchivedStep(step=number, policy_version=8, resumptions=(came_back,), conditions={}, groups=list(groups))


def group_of(group_id: int, run_id: str, *, heard: str) -> Group:
    members = [_member(group_id, member, run_id, heard=heard) for member in range(2)]
    return Group(ticket=ticket(group_id), num_uses=1, trajectories=members)


def _member(group_id: int, member: int, run_id: str, *, heard: str) -> Trajectory:
    """Two turns; the last two tokens were sampled by version 7, those before by version 3."""
    names: dict[str, Any] = {"group_id": group_id, "member": member, "run_id": run_id, "actor": f"actor {heard}"}
    exchanges = (f"click[{member}] ü{END}", (Message("user", heard),)), (f"buy{END}", ())
    tokenizer = byte_tokenizer(CHATML)
    trajectory = spoken(tokenizer, (ASK,), *exchanges, **names, reward=float(member), policy_version=3)
    *first, last = trajectory.version_spans
    new = VersionSpan(start=last.stop - 2, stop=last.stop, policy_version=7)
    spans = [*first, msgspec.structs.replace(last, stop=last.stop - 2), new]
    return msgspec.structs.replace(trajectory, version_spans=spans)
