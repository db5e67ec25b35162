"""A run for tests of `slipstream replay`: groups on a real server, and their tokenizer in a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from slipstream.common.config.config import Config, dump_config, load_config
from slipstream.common.config.replay_config import ReplayConfig
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.message import Message
from slipstream.replay.fleet.fleet import Fleet
from slipstream.replay.records.ticket import Group, InsertResult
from slipstream.replay.run.archive import ArchivedStep, ArchiveWriter
from slipstream.tools.cli.cli import main
from tests.actors.episode.spoken import spoken
from tests.common.text.small_tokenizer import CHATML, END, byte_tokenizer
from tests.replay.buffer.every_verb import FACTS
from tests.replay.records.attempts import Views, leased, ticket

ASK = Message("user", "find plain dress")
VOCAB_SIZE = 300


class Inspected:
    """One run, and what the command says about it."""

    def __init__(
        self, client: redis.Redis, url: str, run_id: str, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.client, self.run_id, self.root = client, run_id, root
        self._settings = [f"redis.url={url}", f"run.name={run_id}", f"run.root={root}"]
        self._capsys = capsys
        self.config = load_config(None, self._settings)
        self.buffer = Views(client, run_id, ReplayConfig(lease_ttl_s=600.0, max_attempts=3), vocab_size=VOCAB_SIZE)
        self.buffer.learner.acquire_epoch()
        byte_tokenizer(CHATML).save_pretrained(root / "model")
        model = {"model_path": str(root / "model"), "vocab_size": VOCAB_SIZE}
        Fleet(client, run_id).describe_run(msgspec.structs.replace(FACTS, config_yaml=dump_config(Config()), **model))

    def archive(self, step: int, groups: list[Group]) -> None:
        writer = ArchiveWriter(RunDir(self.root, self.run_id).trajectories, self.run_id, epoch=1)
        writer.append(ArchivedStep(step=step, policy_version=4, conditions={}, groups=groups))

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What `slipstream replay` prints with `arguments`, on stderr where it refuses."""
        self._capsys.readouterr()
        assert main(["replay", arguments[0], *self._settings, *arguments[1:]]) == code
        said, complained = self._capsys.readouterr()
        assert (complained != "") == (code == 2)
        return complained if code == 2 else said

    def json(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        """The objects that it prints with `--json`."""
        return [json.loads(line) for line in self(*arguments, "--json", code=code).splitlines()]

    def open(self, *group_ids: int) -> None:
        self.buffer.learner.open([ticket(group_id) for group_id in group_ids])

    def filled(self, *group_ids: int, **of: Any) -> None:
        """Open the groups, and fill the first."""
        self.open(*group_ids)
        self.fill(**of)

    def fill(
        self,
        words: Callable[[int], str] = lambda member: f"click[{member}]",
        *,
        members: tuple[int, ...] | None = None,
        rewards: tuple[float, ...] = (0.0, 1.0),
        policy_version: int = 4,
        actor: str = "actor-0",
        heard: str = "red small",
        **recorded: Any,
    ) -> None:
        """Lease the oldest queued group and store `members`, or all of them, with these fields of a trajectory."""
        lease = leased(self.buffer, actor)
        for member in lease.missing if members is None else members:
            trajectory = spoken(
                byte_tokenizer(CHATML),
                (ASK,),
                (f"{words(member)}{END}", (Message("user", heard),)),
                (f"click[buy]{END}", ()),
                group_id=lease.ticket.group_id,
                member=member,
                attempt=lease.missing[member],
                run_id=self.run_id,
                reward=rewards[member % len(rewards)],
                actor=actor,
                policy_version=policy_version,
            )
            trajectory = msgspec.structs.replace(trajectory, **recorded)
            assert self.buffer.actor.insert(lease, trajectory) is InsertResult.STORED
