"""The batch scripts of a run on Slurm: a job of one learner, and an array of hosts of actors.

https://slurm.schedmd.com/sbatch.html
"""

import shlex
from pathlib import Path

from common.config import Config
from common.shutdown import EXIT_PREEMPTED

NOTICE_S = 60  # before the time limit; a preemption sends SIGTERM itself

# The shell gets the signal alone, hands it on, and has a job that left in order queued again. The first wait ends with
# the process or at the signal, the second tells how the process ended.
BODY = """
{setup}
slipstream {verb} {settings} weights.host="$(hostname -I | cut -d' ' -f1)" &
trap "kill -TERM $!" TERM
wait
wait $!
code=$?
if [ $code -eq {left} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


def learner_script(config: Config, settings: Path) -> str:
    """Trains; `settings` is the configuration, in a folder that the nodes share."""
    return _script(config, "learner", settings, gpus=config.launch.learner_gpus, further=[])


def actors_script(config: Config, settings: Path) -> str:
    """Each task of the array is a host."""
    array = f"--array=0-{config.launch.actor_hosts - 1}"
    return _script(config, "actors", settings, gpus=config.launch.actor_gpus, further=[array])


def job_name(config: Config, verb: str) -> str:
    """By which `squeue` finds it."""
    return f"slipstream-{config.run.name}-{verb}"


def _script(config: Config, verb: str, settings: Path, *, gpus: int, further: list[str]) -> str:
    launch = config.launch
    kind = f"{launch.gpu}:" if launch.gpu else ""
    options = [
        f"--job-name={job_name(config, verb)}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={launch.cpus}",
        f"--mem={launch.memory_gib}G", *([f"--gpus-per-node={kind}{gpus}"] if gpus else []), "--requeue",
        "--open-mode=append", f"--output={settings.parent}/{verb}-%j.log", f"--signal=B:TERM@{NOTICE_S}", *further,
        *launch.sbatch,
    ]  # fmt: skip
    body = BODY.format(setup=launch.setup, verb=verb, settings=shlex.quote(str(settings)), left=EXIT_PREEMPTED)
    return "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options) + body
