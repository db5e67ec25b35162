"""The catalogue of drills: what may strike a whole run, with engines, weights, environments and files.

A fault is a function of the stage and a random number generator. It returns what was seen, or raises.
"""

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import psutil
import zmq

from common.shutdown import EXIT_PREEMPTED
from common.weights import blobs
from replay.bulletin import Bulletin, RelayNotice
from tools.child import EXIT_BAD_INPUT, Child
from tools.drill.env import DEADLY, TAKEN, TROUBLES
from tools.drill.stage import DrillFailed, Stage
from tools.soak.faults import (
    BRIEF_S,
    GARBAGE,
    Fault,
    at_checkpoint,
    at_claim,
    at_insert,
    at_lease,
    at_once,
    break_connections,
    cut,
    damage,
    fill_memory,
    flush_scripts,
    hold_connections,
    kill,
    kill_server,
    learner,
    leave,
    lose_replies,
    reset,
    rewrite_log,
    second_learner,
    seen,
    slow,
    steal,
    stop,
    stop_server,
    stopped,
)

LEASE_TTL_S = 4.0
LONG_S = 1.5 * LEASE_TTL_S  # of what stands still: beyond a lease's time
SLOW_S = 0.05  # of a slow link, for each piece and each way
SLOW_FOR_S = 10.0
LIES_FOR_S = 4.0
DamagesFile = Callable[[Path, Random], None]

# --- Six that are waited for until all that they bring about is over: `slipstream drill` plays these in order.


def _in_mid_episode(stage: Stage, host: Child) -> int:
    """Stop the actor of `host` where it holds leases; return how many."""
    while True:
        stage.until(lambda: stage.num_held(host) > 0, f"the actor on {host.name} plays")
        stage.actor(host).send_signal(signal.SIGSTOP)
        num_held = stage.num_held(host)
        if num_held:
            return num_held
        stage.actor(host).send_signal(signal.SIGCONT)


def _expire(stage: Stage, before: int, num_held: int) -> str:
    stage.until(lambda: stage.ledger().expired_leases >= before + num_held, "its leases expire")
    return f"{num_held} leases expired, and others got them"


def kill_actor(stage: Stage, _: Random) -> str:
    before = stage.ledger().expired_leases
    num_held = _in_mid_episode(stage, stage.near)
    dead = stage.actor(stage.near)
    names = {member.name for member in stage.members(stage.near)}
    stage.end_of(stage.near)  # a host gives up on actors that end too often
    dead.kill()
    seen = _expire(stage, before, num_held)
    stage.until(
        lambda: any(member.name not in names and member.generated_tokens for member in stage.members(stage.near)),
        "another actor serves in its place",
    )
    return seen + ", and an actor is in its place"


def stop_actor(stage: Stage, _: Random) -> str:
    before = stage.ledger().expired_leases
    num_held = _in_mid_episode(stage, stage.near)
    stopped = stage.actor(stage.near)
    try:
        seen = _expire(stage, before, num_held)
    finally:
        stopped.send_signal(signal.SIGCONT)
    stage.until(lambda: stage.num_held(stage.near) > 0, "it plays again")
    return seen + "; it came back, and plays"


def slow_link(stage: Stage, _: Random) -> str:
    stage.links["far"].delay_s = SLOW_S
    inserted, ended = stage.ledger().inserted, time.monotonic() + SLOW_FOR_S
    stage.until(lambda: time.monotonic() > ended and stage.ledger().inserted > inserted, "trajectories come")
    stage.links["far"].delay_s = 0.0
    return f"{stage.ledger().inserted - inserted} trajectories came in {SLOW_FOR_S:.0f} s or so"


def partition(stage: Stage, _: Random) -> str:
    before, link, num_held = stage.ledger().expired_leases, stage.links["far"], 0
    while not num_held:
        link.is_cut = False
        stage.until(lambda: stage.num_held(stage.far) > 0, "the actor behind the link plays")
        link.is_cut = True
        num_held = stage.num_held(stage.far)
    try:
        seen = _expire(stage, before, num_held)
    finally:
        link.is_cut = False
    stage.until(lambda: stage.num_held(stage.far) > 0, "it plays again")
    return seen + f"; {link.num_held} pieces were held up, and it plays again"


def restart_server(stage: Stage, _: Random) -> str:
    inserted = stage.ledger().inserted
    stage.restart_server()
    held = stage.ledger().inserted
    stage.until(lambda: stage.ledger().inserted > held, "trajectories come again")
    if held < inserted:
        raise DrillFailed(f"{inserted} trajectories were stored before, and {held} after it")
    return f"{inserted} trajectories were there before and after; all processes continued"


def preempt(stage: Stage, _: Random) -> str:
    before = stage.ledger()
    stage.until(lambda: stage.num_held(stage.far) > 0, "the actor behind the link plays")
    stage.cloud.notice = json.dumps({"action": "terminate", "time": "in two minutes"})
    exit_code = stage.ended(stage.far)
    after = stage.ledger()
    stage.cloud.notice = ""  # another host comes
    if exit_code != EXIT_PREEMPTED:
        raise DrillFailed(f"the host ended with {exit_code}, not {EXIT_PREEMPTED}; see {stage.far.log}")
    if after.expired_leases > before.expired_leases:
        raise DrillFailed(f"{after.expired_leases - before.expired_leases} leases expired that were to be given back")
    parts = after.partials_handed_in - before.partials_handed_in
    return f"the host left with code {EXIT_PREEMPTED}, and handed in {parts} parts of episodes; no lease expired"


SIX: dict[str, Fault[Stage]] = {
    "kill": kill_actor,
    "stop": stop_actor,
    "slow": slow_link,
    "partition": partition,
    "redis": restart_server,
    "preempt": preempt,
}

# --- Processes x signals x moments.


def host(stage: Stage, random: Random) -> Child:
    return random.choice([stage.near, stage.far])


def near(stage: Stage, _: Random) -> Child:
    return stage.near


def actor(stage: Stage, random: Random) -> psutil.Process:
    return _of_host(stage, host(stage, random), stage.actor)


def engine(stage: Stage, random: Random) -> psutil.Process:
    return _of_host(stage, host(stage, random), stage.engine)


def _of_host(stage: Stage, child: Child, find: Callable[[Child], psutil.Process]) -> psutil.Process:
    stage.end_of(child)  # a host gives up on actors that end too often
    return find(child)


def publisher(stage: Stage, _: Random) -> psutil.Process:
    return stage.publisher()


def at_step(stage: Stage) -> None:
    stage.until_step()


def at_offer(stage: Stage) -> None:
    bulletin = Bulletin(stage.client, stage.run_id)
    before = bulletin.highest_version()
    stage.until(lambda: bulletin.highest_version() > before, "new weights are on offer")


def at_half_checkpoint(stage: Stage) -> None:
    """Wait until a checkpoint is half written."""

    def is_half() -> bool:
        folders = stage.dir.checkpoints.glob("step_*")
        return any(not (folder / "manifest.json").exists() for folder in folders)

    stage.until(is_half, "a checkpoint is written", poll_s=0.002)


WhichProcess = Callable[[Stage, Random], psutil.Process]


def kill_process(which: WhichProcess, moment: Callable[[Stage], None]) -> Fault[Stage]:
    def fault(stage: Stage, random: Random) -> str:
        process = which(stage, random)
        moment(stage)
        process.kill()
        seen(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, f"{process.pid} is killed")
        return f"process {process.pid} is gone"

    return fault


def stop_process(which: WhichProcess, seconds: float, moment: Callable[[Stage], None]) -> Fault[Stage]:
    def fault(stage: Stage, random: Random) -> str:
        process = which(stage, random)
        moment(stage)
        process.send_signal(signal.SIGSTOP)
        proof = f"process {process.pid} is {stopped(process.pid)}"
        stage.later(seconds, partial(_go_on, process))
        return proof

    return fault


def _go_on(process: psutil.Process) -> None:
    if process.is_running():
        process.send_signal(signal.SIGCONT)


# --- Files x damage: each while the learner is away, which then has to continue.


def flip(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(bytes(data))


def cut_short(path: Path, random: Random) -> None:
    path.write_bytes(path.read_bytes()[: random.randrange(path.stat().st_size)])


def remove(path: Path, _: Random) -> None:
    path.unlink()


def damage_checkpoint(pattern: str, how: DamagesFile) -> Fault[Stage]:
    """Damage the newest checkpoint: the learner loads the older one and repeats the steps between from the archive."""

    def fault(stage: Stage, random: Random) -> str:
        stage.until(lambda: len(_checkpoints(stage)) >= 2, "there are two checkpoints")
        stage.away(stage.learner)
        newest = _checkpoints(stage)[-1]
        num_logged = stage.learner.log.stat().st_size
        how(random.choice(sorted(newest.glob(pattern))), random)
        stage.back(stage.learner)
        stage.until(lambda: _logged(stage.learner, num_logged, newest.name), "the learner says that it is damaged")
        return f"{newest.name} was damaged, and passed over"

    return fault


def _checkpoints(stage: Stage) -> list[Path]:
    """The finished checkpoints, oldest first."""
    return sorted(path.parent for path in stage.dir.checkpoints.glob("step_*/manifest.json"))


def _logged(child: Child, since: int, words: str) -> bool:
    with child.log.open("rb") as log:
        log.seek(since)
        return words in log.read().decode(errors="replace")


def damage_archive(stage: Stage, random: Random) -> str:
    """Damage an archived step that a resume needs: the learner must name the file, and continue once it is restored."""
    stage.until(lambda: len(_checkpoints(stage)) >= 2, "there are two checkpoints")
    stage.away(stage.learner)
    (*_, before, newest) = _checkpoints(stage)
    step = random.randint(_step(before) + 1, _step(newest))
    (*_, archived) = sorted(stage.dir.trajectories.glob(f"step_{step:06d}.epoch_*.bin"))
    whole = archived.read_bytes()
    flip(archived, random)
    (newest / "manifest.json").unlink()
    stage.back(stage.learner)
    try:
        _ends_naming(stage, archived)
    finally:
        archived.write_bytes(whole)
        stage.back(stage.learner)
    return f"the learner named {archived.name}, and continued once that was back"


def damage_tally(stage: Stage, random: Random) -> str:
    stage.away(stage.learner)
    whole = stage.dir.tally.read_bytes()
    flip(stage.dir.tally, random)
    stage.back(stage.learner)
    try:
        _ends_naming(stage, stage.dir.tally)
    finally:
        stage.dir.tally.write_bytes(whole)
        stage.back(stage.learner)
    return "the learner named tally.json, and continued once that was back"


def _ends_naming(stage: Stage, path: Path) -> None:
    exit_code = stage.ended(stage.learner, comes_back=False)
    words = stage.learner.last_log_lines()
    if exit_code != EXIT_BAD_INPUT or path.name not in words:
        raise DrillFailed(f"the learner ended with {exit_code} over a damaged {path.name}: {words}")


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def damage_metrics(stage: Stage, random: Random) -> str:
    """Add a malformed line to the metrics, which the learner must skip."""
    stage.away(stage.learner)
    with stage.dir.metrics.open("ab") as metrics:
        metrics.write(random.choice(GARBAGE) + b"\n")
    stage.back(stage.learner)
    stage.until_step()
    return "a line of garbage was in the metrics"


def damage_weights(how: DamagesFile) -> Fault[Stage]:
    """Damage the weights on disk: no actor may serve them."""

    def fault(stage: Stage, random: Random) -> str:
        folder = Path(stage.config.weights.disk)
        stage.until(lambda: any(folder.rglob("*")), "weights are on disk")
        num_damaged = 0
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_size:
                how(path, random)
                num_damaged += 1
        if not num_damaged:
            raise DrillFailed(f"{folder} holds no weights")
        return f"{num_damaged} files of weights were damaged"

    return fault


# --- Environments.


def trouble(kind: str) -> Fault[Stage]:
    """Make one episode fail, which is played again. If the actor ends with it, it is started again."""

    def fault(stage: Stage, _: Random) -> str:
        order = stage.orders / kind
        actors = [stage.actor(host) for host in (stage.near, stage.far)]
        for one in (stage.near, stage.far):
            stage.end_of(one)
        order.touch()
        stage.until(lambda: order.with_name(kind + TAKEN).exists(), "an episode suffers it")
        order.with_name(kind + TAKEN).unlink()
        if kind in DEADLY:
            stage.until(lambda: any(not one.is_running() for one in actors), "the actor ends")
            return "the actor ended"
        return "an episode suffered it"

    return fault


# --- Hostile members.


def shout_at_publisher(stage: Stage, random: Random) -> str:
    """Send malformed requests to the publisher, within ZeroMQ's protocol and outside of it."""
    endpoint = _publisher_endpoint(stage)
    num_messages = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 2000)
        dealer.connect(endpoint)
        for body in [*GARBAGE, random.randbytes(5000), b"\x91" * 4000]:
            for message in ([body], [b"", body], [body] * 40):
                dealer.send_multipart(message)
                num_messages += 1
    for data in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03\x00NULL", random.randbytes(4096)):
        with _connected(endpoint) as connection:
            connection.sendall(data)
    return f"{num_messages} messages of garbage, and 3 of no protocol"


def _publisher_endpoint(stage: Stage) -> str:
    """The endpoint of the publisher that runs now. The one that offered the newest weights may have been killed."""
    bulletin, found = Bulletin(stage.client, stage.run_id), list[str]()

    def is_there() -> bool:
        offer = bulletin.latest()
        if offer:
            with contextlib.suppress(OSError):
                _connected(offer.pull_endpoint).close()
                found.append(offer.pull_endpoint)
        return bool(found)

    stage.until(is_there, "a publisher serves")
    return found[0]


def _connected(endpoint: str) -> socket.socket:
    name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((name, int(port)), timeout=10)


def lie_as_relay(stage: Stage, random: Random) -> str:
    """Announce a relay that sends garbage: pullers must report it and use another source."""
    bulletin, closing = Bulletin(stage.client, stage.run_id), threading.Event()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

    def lie() -> None:
        while not closing.is_set():
            if router.poll(20):
                router.send_multipart([router.recv_multipart()[0], random.choice(GARBAGE), b"data"])
        context.destroy(linger=0)

    def announce() -> bool:
        offer = bulletin.latest()
        roots = [blob.root for blob in blobs(offer.manifest)] if offer else []
        notice = RelayNotice(
            name="liar", host=socket.gethostname(), endpoint=endpoint, roots=roots, policy_version=1, num_children=0,
            fan_out=8, fetched_bytes=0, served_bytes=0, num_corrupt=0,
        )  # fmt: skip
        bulletin.announce_relay(notice, ttl_s=2 * LIES_FOR_S)
        return time.monotonic() > ended

    thread, ended = threading.Thread(target=lie, daemon=True), time.monotonic() + LIES_FOR_S
    thread.start()
    try:
        stage.until(announce, "the relay has lied for long enough")
        seen(lambda: any(relay.endpoint == endpoint for relay in bulletin.relays()), "the relay is known")
    finally:
        bulletin.withdraw_relay("liar")
        closing.set()
        thread.join()
    return f"it was known, and blamed {bulletin.blamed().get(endpoint, 0)} times"


CATALOGUE: dict[str, Fault[Stage]] = SIX | {
    "actor killed": kill_process(actor, at_once),
    "actor killed at an insert": kill_process(actor, at_insert),
    "actor killed at an offer": kill_process(actor, at_offer),
    "actor stopped for a moment": stop_process(actor, BRIEF_S, at_once),
    "actor stopped at an insert": stop_process(actor, LONG_S, at_insert),
    "engine killed": kill_process(engine, at_once),
    "engine killed at an offer": kill_process(engine, at_offer),
    "engine stopped for a moment": stop_process(engine, BRIEF_S, at_once),
    "engine stopped beyond its leases": stop_process(engine, LONG_S, at_lease),
    "host killed": kill(host, at_once),
    "host stopped": stop(host, LONG_S, at_once),
    "host leaves": leave(near),
    "publisher killed": kill_process(publisher, at_once),
    "publisher killed at an offer": kill_process(publisher, at_offer),
    "publisher stopped": stop_process(publisher, LONG_S, at_offer),
    "learner killed": kill(learner, at_once),
    "learner killed at a step": kill(learner, at_step),
    "learner killed at an offer": kill(learner, at_offer),
    "learner killed at a claim": kill(learner, at_claim),
    "learner killed at a checkpoint": kill(learner, at_checkpoint),
    "learner killed in a checkpoint": kill(learner, at_half_checkpoint),
    "learner stopped for a moment": stop(learner, BRIEF_S, at_once),
    "learner stopped at a claim": stop(learner, LONG_S, at_claim),
    "learner stopped in a checkpoint": stop(learner, LONG_S, at_half_checkpoint),
    "learner leaves": leave(learner),
    "a second learner": second_learner,
    "server killed at an insert": kill_server(at_insert),
    "server killed at a claim": kill_server(at_claim),
    "server killed at a checkpoint": kill_server(at_checkpoint),
    "server stopped for a moment": stop_server(BRIEF_S),
    "server stopped beyond leases": stop_server(LONG_S),
    "server forgets its scripts": flush_scripts,
    "server breaks connections": break_connections,
    "server rewrites its file": rewrite_log,
    "server full": fill_memory,
    "actor's link cut": cut(host, 1.0),
    "actor's link slow": slow(host),
    "actor's link reset": reset(host),
    "actor's replies lost": lose_replies(host),
    "learner's link cut": cut(learner, 1.0),
    "learner's link cut for long": cut(learner, LONG_S),
    "learner's link slow": slow(learner),
    "learner's link reset": reset(learner),
    "learner's replies lost": lose_replies(learner),
    "garbage in the fleet": damage("fleet", "field"),
    "the fleet is no hash": damage("fleet", "type"),
    "garbage among the deadlines": damage("fleet:deadlines", "type"),
    "garbage among the failures": damage("train:failures", "element"),
    "garbage on offer": damage("weights:latest", "type"),
    "garbage among the relays": damage("weights:relays", "type"),
    "garbage among the members": damage("weights:members", "type"),
    "a shard damaged": damage_checkpoint("*.safetensors", flip),
    "a shard cut short": damage_checkpoint("*.safetensors", cut_short),
    "a shard gone": damage_checkpoint("*.safetensors", remove),
    "a manifest damaged": damage_checkpoint("manifest.json", flip),
    "the archive damaged": damage_archive,
    "the tally damaged": damage_tally,
    "metrics damaged": damage_metrics,
    "weights on disk damaged": damage_weights(flip),
    "weights on disk cut short": damage_weights(cut_short),
    **{f"an environment {kind}": trouble(kind) for kind in TROUBLES},
    "garbage at the publisher's port": shout_at_publisher,
    "a relay that lies": lie_as_relay,
    "a lease stolen": steal,
    "a stranger's connections": hold_connections,
}
