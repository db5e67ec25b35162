"""`make chaos`: schedules of random faults against live processes, each with books that must balance afterwards.

A schedule is drawn from its seed: which faults of the catalogue, and with how much time between them. Every schedule
begins with a new server, a learner and actors (stand-ins, on links of their own), suffers its faults, and must then
work again by itself, end in order, and have lost nothing. One that does not is made as small as it still fails, and
printed as a command.

    python -m slipstream.tools.lab.soak.chaos --schedules 500
    python -m slipstream.tools.lab.soak.chaos --seed 17 --only 0 3
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from slipstream.tools.drill.schedule import Outcome, Strike, draw, only, report, say_again
from slipstream.tools.lab.soak.chaos_faults import CATALOGUE
from slipstream.tools.lab.soak.stage import SoakStage

MAX_GAP_S = 1.5
NUM_ACTORS = 3


def suffer(strikes: Sequence[Strike], directory: Path, *, seed: int) -> Outcome:
    """Play one schedule in an empty `directory`."""
    stage = SoakStage(directory, num_actors=NUM_ACTORS, seed=seed, linked=True)
    fired: dict[str, str] = {}
    failures: list[str] = []
    recovered_s: dict[str, float] = {}
    try:
        stage.start()
        stage.until_answered()
        for strike in strikes:
            _pass(stage, strike.gap_s)
            fired[strike.fault] = CATALOGUE[strike.fault](stage, Random(strike.seed))
        stage.undo_all()
        recovered_s[strikes[-1].fault] = _recovered(stage)
        accounts = stage.end()
        failures += accounts.lost + accounts.twice + accounts.wrong
    except Exception as error:  # whatever a fault brings about is what is looked for
        failures.append(f"{type(error).__name__}: {error}")
    finally:
        stage.close()
    return Outcome(fired=fired, failures=failures + stage.unasked, recovered_s=recovered_s)


def main(arguments: Sequence[str]) -> int:
    """Play the schedules. Return 0 if all of them held."""
    asked = _parsed(arguments)
    outcomes: list[Outcome] = []
    for seed in range(asked.seed, asked.seed + asked.schedules):
        drawn = draw(seed, CATALOGUE, max_gap_s=MAX_GAP_S)
        strikes = only(drawn, asked.only)
        outcome = _play(strikes, seed=seed)
        outcomes.append(outcome)
        ended = "FAILED" if outcome.failures else f"held, recovered in {max(outcome.recovered_s.values()):.1f} s"
        print(f"schedule {seed}: {', '.join(strike.fault for strike in strikes)}: {ended}", flush=True)
        for failure in outcome.failures:
            print(f"  {failure}", flush=True)
        if outcome.failures and not asked.only:
            say_again(
                f"python -m slipstream.tools.lab.soak.chaos --seed {seed}", drawn, strikes, partial(_play, seed=seed)
            )
    print(json.dumps(report(outcomes, CATALOGUE, asked.report)), flush=True)
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.tools.lab.soak.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", type=int, default=1, help="how many, of one seed after another")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first schedule")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="the faults of the schedule, by their number")
    parser.add_argument("--report", type=Path, default=Path("build/chaos.json"))
    return parser.parse_args(arguments)


def _play(strikes: Sequence[Strike], *, seed: int) -> Outcome:
    with TemporaryDirectory(prefix="slipstream-chaos-") as directory:
        return suffer(strikes, Path(directory), seed=seed)


def _pass(stage: SoakStage, seconds: float) -> None:
    ended = time.monotonic() + seconds
    stage.until(lambda: time.monotonic() > ended, "time passes")


def _recovered(stage: SoakStage) -> float:
    started, step = time.monotonic(), stage.saved_step()
    stage.until_answered()
    stage.until(lambda: stage.saved_step() > step, "a step is durable")
    return round(time.monotonic() - started, 3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
