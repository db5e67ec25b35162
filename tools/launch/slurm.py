"""The batch scripts of a run on Slurm: a job for the learner, and a job array with one task per host of actors.

https://slurm.schedmd.com/sbatch.html
"""

import shlex
from pathlib import Path

from slipstream.common.config.config import Config
from slipstream.common.process.shutdown import EXIT_PREEMPTED
from slipstream.tools.launch.launch_options import LaunchOptions
from slipstream.tools.run.host_command import host_settings

NOTICE_S = 60  # the signal comes this long before the time limit; a preemption sends SIGTERM anyway

# Only the shell gets the signal. It forwards the signal, and requeues the job if the process exits as preempted. A
# signal interrupts the wait for the process, so it is waited for again.
BODY = """
{setup}
host="$(hostname -I | cut -d' ' -f1)"
{command} &
trap "kill -TERM $!; signalled=1" TERM
signalled=1
while [ $signalled -eq 1 ]; do
  signalled=0
  wait $!
  code=$?
done
if [ $code -eq {left} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""

# On each node of the learner. The port differs between the jobs that a node may have at a time.
ON_EACH_NODE = """\
srun --ntasks={nodes} --ntasks-per-node=1 \\
  bash -c 'exec slipstream learner "$@" learner.host_rank="$SLURM_NODEID"' learner \\
  {own} weights.host="$host" learner.rendezvous="$host:$((20000 + SLURM_JOB_ID % 20000))\""""


def learner_script(config: Config, options: LaunchOptions, settings: Path) -> str:
    """The script of the learner; `settings` is the configuration file, in a folder that its nodes can read.

    With several `learner.hosts` it has as many nodes. The script runs on the first of them, and srun on each.
    """
    return _script(config, options, "learner", settings, gpus=options.learner_gpus, further=[])


def actors_script(config: Config, options: LaunchOptions, settings: Path) -> str:
    """The script of the array of actor hosts; each task of the array is one host, and reads no file."""
    array = f"--array=0-{options.actor_hosts - 1}"
    return _script(config, options, "actors", settings, gpus=options.actor_gpus, further=[array])


def job_name(config: Config, verb: str) -> str:
    """The name of a job in `squeue`."""
    return f"slipstream-{config.run.name}-{verb}"


def _script(config: Config, options: LaunchOptions, verb: str, settings: Path, *, gpus: int, further: list[str]) -> str:
    kind = f"{options.gpu}:" if options.gpu else ""
    nodes = config.learner.hosts if verb == "learner" else 1
    lines = [
        f"--job-name={job_name(config, verb)}",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        f"--cpus-per-task={options.cpus}",
        f"--mem={options.memory_gib}G",
        *([f"--gpus-per-node={kind}{gpus}"] if gpus else []),
        "--requeue",
        "--open-mode=append",
        f"--output={settings.parent}/{verb}-%j.log",
        f"--signal=B:TERM@{NOTICE_S}",
        *further,
        *options.sbatch.split(),
    ]
    transport, url = config.actors.transport, config.redis.url
    own = host_settings(config, transport=transport, redis_url=url) if verb == "actors" else [str(settings)]
    command = f'slipstream {verb} {shlex.join(own)} weights.host="$host"'
    if nodes > 1:
        command = ON_EACH_NODE.format(nodes=nodes, own=shlex.join(own))
    body = BODY.format(setup=options.setup, command=command, left=EXIT_PREEMPTED)
    return "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in lines) + body
