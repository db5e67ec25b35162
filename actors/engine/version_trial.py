"""A committed version until the engine has scored its probe."""

from dataclasses import dataclass, field

from slipstream.actors.engine.orders import Commit, Ended, Failed, Generate
from slipstream.common.transfer.probe import Probe

MAX_NAMED = 4  # suspects


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What is needed to end the trial of a version, whichever way it ends."""

    commit: Commit
    probe: Probe
    pause_s: float  # of the commit
    former_version: int
    # Generations that ended meanwhile, by call: they may contain tokens of the version on trial.
    kept_back: dict[int, tuple[Generate, Ended | Failed]] = field(default_factory=dict)


def refused(trial: Trial, why: str, *, untouched: list[str]) -> str:
    """The reason for the actor and the learner; `untouched` are the parameters that no tensor was loaded for."""
    version = trial.commit.policy_version
    reason = f"version {version} is refused by its probe: {why}"
    if untouched:
        more = f" and {len(untouched) - MAX_NAMED} more" if len(untouched) > MAX_NAMED else ""
        reason += f"; the engine's loader took no tensor for {', '.join(untouched[:MAX_NAMED])}{more}"
    if trial.former_version < 0:
        reason += "; no version has passed on this engine yet: do vLLM and transformers compute this model alike?"
    return reason
