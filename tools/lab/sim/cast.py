"""The processes of a simulated run: the product's learner without a model, and stand-ins for the others.

`learn`, `Lead`, `Supply`, checkpoints, archive, fence, buffers and bulletin are the product's. In place of a model
are the attempts that it learned from, in the order of the steps. A checkpoint's shard is a file of them. The thread
that writes it is a greenlet, and the publisher announces a hash of them. An actor calls the buffer as `actors` does.
"""

import contextlib
import itertools
import json
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import redis
import torch
import xxhash
from greenlet import getcurrent

from slipstream.common.config.config import dump_config, load_config
from slipstream.common.process import output, redis_retry, run_dir
from slipstream.common.process.run_dir import RunDir
from slipstream.common.records.trajectory import Outcome, StopReason, Trajectory
from slipstream.common.transfer.weights import Manifest, Offer
from slipstream.learner import learn as learning
from slipstream.learner import rerun
from slipstream.learner.checkpoint import checkpoint, checkpoint_writer, fence
from slipstream.learner.lead import connections, lead
from slipstream.learner.lead.connections import join_run
from slipstream.learner.lead.lead import Lead
from slipstream.learner.lead.run_record import RunRecord
from slipstream.learner.publisher.weight_server import RENEW_S
from slipstream.learner.step import clock
from slipstream.learner.supply import supply
from slipstream.learner.supply.shared_batch import claimed_batch
from slipstream.learner.supply.supply import Supply
from slipstream.replay.buffer import actor_buffer, bulk, learner_buffer
from slipstream.replay.buffer.actor_buffer import ActorBuffer
from slipstream.replay.fleet import bulletin
from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.replay.fleet.fleet import RunFacts
from slipstream.replay.records.keys import FencedOut
from slipstream.replay.records.ticket import InsertResult, Lease
from slipstream.tools.lab.sim.world import Client, Process, World
from slipstream.tools.lab.soak.actor import VOCAB_SIZE, Work, an_attempt

RUN = "sim"
POLL_S = 0.05
EPISODE_S = 0.08
CONFIG = load_config(
    None,
    [
        f"run.name={RUN}",
        "env.name=shop",
        "env.options.profile=small",
        "replay.group_size=2",
        "replay.groups_per_step=2",
        "replay.max_attempts=1000",
        "replay.lease_ttl_s=2",
        "objective.advantage=group_standardised",
        "learner.checkpoint_every=2",
        "learner.steps=1000",
        "eval.num_tasks=1",
    ],
)
CPU = types.SimpleNamespace(rank=0, num_ranks=1, device=torch.device("cpu"))
Name = str  # of one attempt, unlike all others


def name_of(trajectory: Trajectory) -> Name:
    return (
        f"{trajectory.group_id}.{trajectory.member}.{trajectory.attempt} {trajectory.actor} {trajectory.started_at_s}"
    )


@dataclass(kw_only=True)
class Seen:
    """What the processes have seen: the material of the checks."""

    violations: list[str] = field(default_factory=list)
    acknowledged: dict[Name, int] = field(default_factory=dict)  # when, in us
    versions: dict[int, str] = field(default_factory=dict)  # the root of each published version
    fences: dict[int, tuple[int, str]] = field(default_factory=dict)  # the group and the actor of each
    is_partial: bool = False  # the server has lost something
    epochs: dict[int, str] = field(default_factory=dict)  # the learner of each
    learned_by: dict[Name, list[str]] = field(default_factory=dict)  # which learners, each time


class Model:
    """The attempts that each step learned from."""

    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.steps: list[list[Name]] = []

    @property
    def root(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self.steps).encode())


class Cast:
    """Starts the processes of one world; the product's modules see its time."""

    def __init__(self, world: World, root: Path) -> None:
        self.world = world
        self.seen = Seen()
        self.run_dir = RunDir(root, RUN)
        self.run_dir.create()

    def learner(self, name: str) -> "LearnerProcess":
        return LearnerProcess(self, name)

    def actor(self, name: str) -> Process:
        process = Process(name)
        self.world.spawn(process, lambda: self._act(process))
        return process

    def client(self) -> Client:
        return Client(self.world, getcurrent().process)

    def _act(self, process: Process) -> None:
        client = self.client()
        buffer = ActorBuffer(client, RUN, CONFIG.replay, vocab_size=VOCAB_SIZE)
        board, version = Bulletin(client, RUN), -1
        while True:
            version = self._refreshed(board, version)
            lease = buffer.lease(process.name)
            if lease is None:
                self.world.sleep(POLL_S)
                continue
            held = self.seen.fences.setdefault(lease.fence, (lease.ticket.group_id, process.name))
            if held != (lease.ticket.group_id, process.name):
                self.seen.violations.append(f"fence {lease.fence} was given out twice")
            while version < lease.ticket.min_policy_version:
                self.world.sleep(POLL_S)
                if not buffer.heartbeat(process.name, [lease]):
                    break
                version = self._refreshed(board, version)
            else:
                self._play(process, buffer, lease, version)

    def _refreshed(self, board: Bulletin, version: int) -> int:
        offer = board.latest()
        if offer is None:
            return version
        found = offer.manifest
        if self.seen.versions.get(found.policy_version) != found.root:
            self.seen.violations.append(f"version {found.policy_version} was offered with other weights")
        if found.policy_version < version and not self.seen.is_partial:
            self.seen.violations.append(f"version {found.policy_version} was offered after {version}")
        return max(version, found.policy_version)

    def _play(self, process: Process, buffer: ActorBuffer, lease: Lease, version: int) -> None:
        chance = self.world.random
        for member, attempt in lease.missing.items():
            self.world.sleep(EPISODE_S * 2 * chance.random())
            if not buffer.heartbeat(process.name, [lease]):
                return
            if chance.random() < 0.05:
                buffer.hand_in(lease, self._attempt(process, lease, member, attempt, version, StopReason.PREEMPTED))
                break
            if chance.random() < 0.05:
                failed = buffer.fail(lease, member, attempt=attempt, outcome=Outcome.ENV_FAILURE, reason="simulated")
                if failed is None:
                    return
                attempt = failed
            trajectory = self._attempt(process, lease, member, attempt, version, StopReason.DONE)
            result = buffer.insert(lease, trajectory)
            if result is InsertResult.FENCED:
                return
            if result is not InsertResult.FULL:
                self.seen.acknowledged[name_of(trajectory)] = self.world.now_us
        buffer.release(lease, death="simulated" if chance.random() < 0.05 else "")

    def _attempt(
        self, process: Process, lease: Lease, member: int, attempt: int, version: int, stop: StopReason
    ) -> Trajectory:
        work = Work(url="", run_id=RUN, name=process.name, num_tokens=8)
        made = an_attempt(work, lease, member, attempt, stop, chance=self.world.random)
        spans = [msgspec.structs.replace(made.version_spans[0], policy_version=version)]
        return msgspec.structs.replace(made, version_spans=spans, started_at_s=self.world.time())


class LearnerProcess(Process):
    """A learner with its publisher and its writer of checkpoints."""

    def __init__(self, cast: Cast, name: str) -> None:
        super().__init__(name)
        self.cast = cast
        self.shutdown = types.SimpleNamespace(requested=threading.Event())
        self.learner: Any = None
        cast.world.spawn(
            self,
            lambda: learning.learn(CONFIG, cast.run_dir, ranks=CPU, shutdown=self.shutdown),  # type: ignore[arg-type]
        )


class Checkpoints:
    """`CheckpointWriter` with a greenlet in place of its thread."""

    def __init__(self, folder: Path, check: Callable[[], None]) -> None:
        self.fence = fence.Fence(folder)
        self.fence.take(check)
        self._folder = folder
        self._process: LearnerProcess = getcurrent().process
        self._is_writing = False
        self._error: Exception | None = None

    def newest(self) -> Path | None:
        newest = checkpoint.latest_checkpoint(self._folder)
        if newest:
            checkpoint_writer._set_aside_after(newest, fence=self.fence)
        return newest

    def begin(self, models: Any, *, progress: checkpoint.Progress, once_durable: Callable[[], None]) -> None:
        self.wait()
        state: Any = {"steps": list(models.policy.steps)}
        snapshot = checkpoint.Snapshot(state=state, schedule_step=0, progress=progress)
        self._is_writing = True

        def write() -> None:
            try:
                checkpoint.write(self._folder, snapshot, group=None, keep=2, fence=self.fence)  # type: ignore[arg-type]
                once_durable()
            except Exception as error:
                self._error = error
            finally:
                self._is_writing = False

        self._process.cast.world.spawn(self._process, write)

    def raise_failure(self) -> None:
        if not self._is_writing:
            self.wait()

    def wait(self) -> None:
        while self._is_writing:
            self._process.cast.world.sleep(POLL_S / 5)
        if self._error:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        while self._is_writing:
            self._process.cast.world.sleep(POLL_S / 5)


class Versions:
    """`VersionWriter` and the publisher process: announces the newest version, in the background."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._process: LearnerProcess = getcurrent().process
        cast = self._process.cast
        self._board = Bulletin(Client(cast.world, self._process), RUN)
        self._waiting: Manifest | None = None
        self._is_announcing = False
        self._fenced: FencedOut | None = None
        self._announced: Manifest | None = None
        cast.world.spawn(self._process, self._renew)

    def publish(self, *, policy_version: int, probe: None) -> None:
        if self._fenced:
            raise self._fenced
        cast, learner = self._process.cast, self._process.learner
        root = cast.seen.versions.setdefault(policy_version, learner.model.root)
        if root != learner.model.root:
            cast.seen.violations.append(f"version {policy_version} names two sets of weights")
        self._waiting = Manifest(
            policy_version=policy_version,
            learner_epoch=learner.epoch,
            tensors=[],
            num_bytes=0,
            root=learner.model.root,
            adapted=None,
            probe=probe,
            anchor=None,
            deltas=[],
        )
        if not self._is_announcing:
            self._is_announcing = True
            cast.world.spawn(self._process, self._announce)

    def _announce(self) -> None:
        while manifest := self._waiting:
            self._process.cast.world.sleep(POLL_S)
            try:
                self._board.announce(Offer(manifest=manifest, pull_endpoint=""))
            except FencedOut as error:
                self._fenced = error
                self._waiting = None
            except redis.RedisError:
                continue
            self._announced = manifest
            if self._waiting is manifest:
                self._waiting = None
        self._is_announcing = False

    def _renew(self) -> None:
        while self._process.is_running and not self._fenced:
            self._process.cast.world.sleep(RENEW_S)
            offer = self._announced
            with contextlib.suppress(redis.RedisError, FencedOut):
                if offer and not self._waiting and self._board.highest_version() < offer.policy_version:
                    self._board.announce(Offer(manifest=offer, pull_endpoint=""))

    def close(self) -> None:
        self._waiting = None


class Record(RunRecord):
    """The record of a run without its metrics."""

    def __init__(self, *_: Any, tally: Any, **__: Any) -> None:
        self.tally = tally

    def write_step(self, *_: Any, **__: Any) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def found(self) -> None:
        return None


class NoThread:
    """In place of a thread of rank 0 that is about its server only."""

    def __init__(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


def _join(config: Any, run_dir: RunDir, shutdown: Any) -> Any:
    facts = RunFacts(
        config_yaml=dump_config(config),
        model_path="/model",
        model_files=[],
        vocab_size=VOCAB_SIZE,
        tokenizer_root="",
        own_modules={},
    )
    return join_run(getcurrent().process.cast.client(), config, facts)


def _load_learner(config: Any, run_dir: RunDir, ranks: Any, *, check: Callable[[], None]) -> Any:
    writer, model = Checkpoints(run_dir.checkpoints, check), Model()
    progress = checkpoint.Progress(step=0, policy_version=0, highest_published=-1, next_group_id=0, tokens_trained=0)
    newest = writer.newest()
    if newest is not None:
        progress = checkpoint._read_manifest(newest).progress
        model.steps = json.loads((newest / "shard").read_bytes())
    learner = types.SimpleNamespace(
        config=config,
        run_dir=run_dir,
        ranks=ranks,
        model=model,
        models=types.SimpleNamespace(policy=model),
        critic=None,
        progress=progress,
        checkpoints=writer,
        checkpoint_step=-1 if newest is None else progress.step,
        has_checkpoint=newest is not None,
        flops=None,
        epoch=0,
    )
    getcurrent().process.learner = learner
    return learner


def _take_the_lead(learner: Any, joined: Any, _: Any) -> Lead:
    process = getcurrent().process
    learner.epoch = joined.epoch
    if process.cast.seen.epochs.setdefault(joined.epoch, process.name) != process.name:
        process.cast.seen.violations.append(f"epoch {joined.epoch} was given out twice")
    return Lead(
        joined,
        CONFIG,
        learner.run_dir,
        progress=learner.progress,
        conditions={},
        publishing=types.SimpleNamespace(adapted=None),  # type: ignore[arg-type]
        fence=learner.checkpoints.fence,
        flops=None,  # type: ignore[arg-type]
        decode=str,
    )


def _supply(train: learner_buffer.LearnerBuffer, _: Any, *, first_group_id: int, **__: Any) -> Supply:
    return Supply(train, CONFIG, first_group_id=first_group_id, sleep=getcurrent().process.cast.world.sleep)


def _train_on(learner: Any, batch: Any, _: Any) -> Any:
    process = getcurrent().process
    process.cast.world.sleep(POLL_S)
    learner.model.steps.append([name_of(each) for group in batch.groups for each in group.trajectories])
    for name in learner.model.steps[-1]:
        process.cast.seen.learned_by.setdefault(name, []).append(process.name)
    before = learner.progress
    learner.progress = msgspec.structs.replace(
        before,
        step=before.step + 1,
        policy_version=before.policy_version + 1,
        next_group_id=max(before.next_group_id, batch.next_group_id),
    )
    return types.SimpleNamespace(skipped=False, grad_norm=1.0)


def _save_shard(state: dict[str, Any], *, storage_writer: Path, process_group: None) -> None:
    file = storage_writer / "shard"
    with file.open("wb") as stream:
        stream.write(json.dumps(state["steps"]).encode())
    output.sync_path(file)


def _nothing(*_: Any, **__: Any) -> None:
    pass


_IN_PLACE: list[tuple[Any, dict[str, Any]]] = [
    (
        learning,
        {
            "join": _join,
            "load_learner": _load_learner,
            "_take_the_lead": _take_the_lead,
            "Supply": _supply,
            "Published": _nothing,
            "VersionWriter": Versions,
            "share": lambda value, *_, **__: value,
            "shared_batch": lambda *arguments, **_: claimed_batch(*arguments),
            "scored": lambda _, batch: batch,
            "train_on": _train_on,
            "probe_of": _nothing,
            "begin": _nothing,
            "export": _nothing,
            "resolve_dtype": _nothing,
        },
    ),
    (rerun, {"begin": _nothing, "scored": lambda _, batch: batch, "train_on": _train_on}),
    (
        checkpoint,
        {
            "dist": types.SimpleNamespace(get_rank=lambda _: 0, broadcast=_nothing),
            "state_dict_saver": types.SimpleNamespace(save=_save_shard),
            "ShardWriter": lambda path: path,
        },
    ),
    (connections, {"Repertoire": NoThread, "dump_config": lambda _: ""}),
    (
        lead,
        {
            "RunRecord": Record,
            "Publisher": lambda *_, **__: types.SimpleNamespace(close=_nothing, stats=None),
            "Refusals": _nothing,
            "num_held_out": lambda _: 0,
        },
    ),
]
_TIMED = (redis_retry, run_dir, fence, clock, supply, actor_buffer, bulk, learner_buffer, bulletin)


@contextmanager
def in_world(world: World) -> Iterator[None]:
    """The product's modules see the world's time, and the learner what is above in place of its model."""
    changed = [(module, names | {}) for module, names in _IN_PLACE]
    for module in _TIMED:
        changed.append((module, {name: world for name in ("time", "uuid") if hasattr(module, name)}))
    changed.append((tempfile, {"_name_sequence": map("{:08x}".format, itertools.count())}))  # so that a trace repeats
    before = [(module, name, getattr(module, name)) for module, names in changed for name in names]
    try:
        for module, names in changed:
            for name, value in names.items():
                setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
