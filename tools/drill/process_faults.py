"""Processes x signals x moments."""

import signal
from collections.abc import Callable
from functools import partial
from random import Random

import psutil

from slipstream.replay.fleet.bulletin import Bulletin
from slipstream.tools.drill.faults import (
    Fault,
    seen,
    stopped,
)
from slipstream.tools.drill.stage import Stage
from slipstream.tools.run.child import Child

WhichProcess = Callable[[Stage, Random], psutil.Process]


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
