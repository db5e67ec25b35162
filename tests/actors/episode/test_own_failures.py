"""What a policy does to the sandbox is its own failure: it gets an answer in time, and its episode is not redone."""

import asyncio
from functools import partial

from slipstream.actors.episode.answer import answer
from slipstream.common.records.trajectory import Task
from slipstream.envhub.catalogue import make_env
from slipstream.envhub.env import Observation

STEP_S = 8.0
STOP = "import os, time\nfor pid in (1, os.getppid()):\n    os.kill(pid, 19)\nos.kill(-1, 19)\ntime.sleep(1000)\n"
STOP_IN_BASH = "kill -STOP 1; kill -STOP $PPID; kill -STOP -1; sleep 1000"
PLAYED = {
    "shell": [f"Act: bash\n```bash\n{STOP_IN_BASH}\n```"],
    "code": [f"run\n```python\n{STOP}```", f"submit\n```python\n{STOP}```"],
    "swe": ["test", "submit"],
}


async def _played(name: str) -> list[Observation]:
    env = make_env(name, {})
    await env.reset(Task(env=name, split="train", index=0))
    if name == "swe":  # so that its own tests, and those that judge it, run into it
        spoil = f"bash for f in */*.py; do cat > $f <<'END'\n{STOP}END\ndone"
        await answer(partial(env.step, spoil), timeout_s=STEP_S)
    said = [await answer(partial(env.step, action), timeout_s=STEP_S) for action in PLAYED[name]]
    await env.close()
    return said


async def test_a_policy_that_stops_what_runs_it_has_failed_by_itself() -> None:
    for name, said in zip(PLAYED, await asyncio.gather(*map(_played, PLAYED)), strict=True):
        assert len(said) == len(PLAYED[name])
        if name != "shell":
            assert said[-1].terminated and said[-1].score == 0.0, name
