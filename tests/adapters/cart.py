"""CartPole, spoken: an environment of a user's own, as docs/adapters.md tells it."""

from slipstream.envhub.gym_speech import Moment, Speech


def _show(moment: Moment) -> str:
    position, speed, angle, turning = moment.observation
    return f"cart at {position:.2f}, moving {speed:.2f}; pole at {angle:.3f} rad, turning {turning:.2f}"


def _parse(_: Moment, action: str) -> int | None:
    return {"left": 0, "right": 1}.get(action.strip().lower())


def _balance(moment: Moment) -> str:
    _, _, angle, turning = moment.observation
    return "right" if angle + turning > 0 else "left"


SPEECH = Speech(
    rules="Keep the pole upright: push the cart left or right.",
    show=_show,
    parse=_parse,
    score=lambda ending: min(1.0, ending.total_reward / 200),
    actions=lambda moment: ["left", "right"],
    key=lambda moment: repr(moment.observation.tolist()),
    expert=_balance,
)
NO_SPEECH = "left"
