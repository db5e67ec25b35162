"""Files x damage: each while the learner is away, which then has to continue."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from slipstream.tools.drill.faults import (
    GARBAGE,
    Fault,
)
from slipstream.tools.drill.stage import DrillFailed, Stage
from slipstream.tools.run.child import EXIT_BAD_INPUT, Child

DamagesFile = Callable[[Path, Random], None]


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
