"""`slipstream export`: a model card for a run's trained model, its upload to a hub, or the run's critic as a folder."""

import shlex
import sys
from pathlib import Path

from slipstream.common.config.config import Config, load_config
from slipstream.common.process.config_error import ConfigError, reason
from slipstream.common.process.metrics import newest_metrics
from slipstream.common.process.output import held, write_whole
from slipstream.common.process.run_dir import RunDir
from slipstream.tools.run.export_options import ExportOptions
from slipstream.tools.run.hub import FILES
from slipstream.tools.run.model_card import card_of

CARD = "README.md"
RANK_TIMEOUT_S = 600.0


def export(config: Config, *, options: ExportOptions) -> int:
    """Write the card, or the critic, upload if that is asked for, and print where the model is. Raises ConfigError."""
    run_dir = RunDir(config.run.root, config.run.name)
    if options.critic:
        with held(run_dir.trained_critic):
            print(_exported_critic(run_dir))
        return 0
    folder = run_dir.trained_model
    if not any(folder.glob("*.safetensors")):
        ends = finish_command(run_dir)
        cure = f"`{ends}` writes it" if ends else "a run writes its model when it ends, or name another `run.name`"
        raise ConfigError(f"{folder} has no *.safetensors; {cure}")
    with held(folder / CARD):
        if (folder / CARD).exists():
            print(f"{folder / CARD} is kept; delete it for a new one", file=sys.stderr)
        else:
            write_whole(folder / CARD, card_of(run_dir))
        print(_uploaded(run_dir, options) if options.to_hub else folder)
    return 0


def finish_command(run_dir: RunDir) -> str:
    """The command that ends a stopped run at its last step, and so writes its model; empty before the first.

    A re-run continues to its own last step.
    """
    steps = [record["step"] for record in newest_metrics(run_dir.metrics) if "trained/reward" in record]
    root = "" if run_dir.path.parent == Path("runs") else f" run.root={shlex.quote(str(run_dir.path.parent))}"
    if steps and load_config(str(run_dir.config), []).run.rerun_of:
        return f"slipstream learner {run_dir.path.name}{root}"
    return f"slipstream up --resume {run_dir.path.name}{root} learner.steps={steps[-1]}" if steps else ""


def _exported_critic(run_dir: RunDir) -> Path:
    from slipstream.learner.fit.critic_export import export_critic  # they import torch
    from slipstream.learner.ranks.ranks import join_ranks, leave_ranks, resolve_dtype

    config = load_config(str(run_dir.config), [])
    ranks = join_ranks(timeout_s=RANK_TIMEOUT_S)
    try:
        resolve_dtype(config.model, ranks.device)
        return export_critic(config, run_dir, ranks=ranks)
    finally:
        leave_ranks()


def _uploaded(run_dir: RunDir, options: ExportOptions) -> str:
    """Upload the trained model in one commit, and return its address. Raises ConfigError."""
    # Here: the card alone needs neither network nor token.
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP client that it uses

    name, token = options.to_hub, get_token()
    if not token:
        raise ConfigError(f"`--to-hub` {name} needs a token that may write; set HF_TOKEN, or run `hf auth login`")
    hub = HfApi(token=token)
    try:
        hub.create_repo(name, private=not options.public, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=name,
            folder_path=run_dir.trained_model,
            allow_patterns=[*FILES, CARD],
            commit_message=f"Run {run_dir.path.name}",
        )
    except (HTTPError, OSError, ValueError) as error:  # of the network, the Hub's client and the disk
        raise ConfigError(
            f"`--to-hub` {name} was not uploaded: {reason(error)}; the card is in {run_dir.trained_model}"
        ) from error
    return str(commit.commit_url)
