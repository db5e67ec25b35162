"""The model card of a run: what was trained, on what, how far, from the run's own records."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from slipstream.common.config.config import Config, key_paths, load_config, value_of
from slipstream.common.process.headline import headline, wilson
from slipstream.common.process.metrics import read_metrics
from slipstream.common.process.output import read_json
from slipstream.common.process.run_dir import RunDir
from slipstream.tools.see.metrics_window import Record
from slipstream.tools.see.run_files import RunFiles, read_run

SNAPSHOT = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]+)")
# Nothing about hosts, folders, servers and keys is published.
SECTIONS = ("model", "env", "sampling", "replay", "objective", "optim", "learner", "warm_start")
FIT_SECTIONS = ("model", "optim", "learner")
MISSING = "not recorded"
HIDDEN = ("model.path", "learner.devices", "learner.rendezvous")
_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://")


def card_of(run_dir: RunDir) -> str:
    """The card as Markdown with Hugging Face's metadata; it says what was not recorded. Raises ConfigError."""
    config = load_config(str(run_dir.config), [])
    fit = run_dir.fit  # of `slipstream fit sft`, `dpo` and `reward`
    sections: Sequence[str]
    if fit.exists():
        records = list(read_metrics(run_dir.metrics, not_finite=math.nan))
        rows, sections, tags = _fit_rows(fit, records), FIT_SECTIONS, "slipstream"
    else:
        rows, sections, tags = _rl_rows(read_run(run_dir), config), SECTIONS, "slipstream, reinforcement-learning"
    hub_id, base = base_model(config)
    lines = ["---", "library_name: transformers", f"tags: [{tags}]"]
    lines += [f"base_model: {hub_id}"] if hub_id else []
    lines += ["---", f"# {run_dir.path.name}", "", "Trained by Slipstream. All numbers are this run's own records.", ""]
    lines += ["| | |", "|---|---|", f"| base model | {_cell(base)} |"]
    check = run_dir.path / "export_check.txt"
    rows["loaded again"] = check.read_text(encoding="utf-8").strip() if check.is_file() else MISSING
    lines += [f"| {name} | {_cell(text)} |" for name, text in rows.items()]
    lines += ["", "## Configuration", "", "Every key that differs from its default, without paths and addresses:", ""]
    return "\n".join([*lines, "```yaml", *_differences(config, sections), "```", ""])


def base_model(config: Config) -> tuple[str, str]:
    """Return the Hub's id of the base model, empty if it is not of the Hub, and what the card says of it."""
    found = SNAPSHOT.search(config.model.path)
    if found:
        name = f"{found[1]}/{found[2]}"
        return name, f"{name} at {found[3][:12]}"
    if not config.model.path:
        return "", "a tiny model with random weights"
    return "", f"{PurePath(config.model.path).name}, a folder"


def _rl_rows(run: RunFiles, config: Config) -> dict[str, str]:
    found = headline(run.steps, until=config.last_full_step)
    lag, most = _last(run.steps, "lag/mean"), _last(run.steps, "lag/max")
    lags = MISSING if lag is None or most is None else f"{lag:.1f} optimizer steps, {most:.0f} at most"
    data = "; ".join(f"{name}: {json.dumps(_public(entry.options))}" for name, entry in config.env.entries().items())
    return {
        "environments": data,
        "optimizer steps": f"{run.steps[-1]['step']:.0f}" if run.steps else MISSING,
        "held-out success": _held_out(run.evaluations),
        "newest episodes": f"{found}, of {found.num_episodes} episodes" if found else MISSING,
        "lag at the last step": lags,
        "tokens trained": f"{run.summary.cost.tokens_trained:,}" if run.summary else MISSING,
    }


def _fit_rows(fit: Path, records: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Of an imitation, DPO or a reward model, which have no episodes and no lag. Raises ConfigError."""
    settings = read_json(fit, dict[str, Any], cure="restore it from a copy")
    shown = {
        "loss of the last step": "fit/loss",
        "held-out loss": "fit/held_out_loss",
        "held-out accuracy": "fit/held_out_accuracy",
    }
    values = {text: _last(records, name) for text, name in shown.items()}
    return {
        "fit": " ".join(f"{key} {settings.get(key)}" for key in ("goal", "--epochs", "--batch-rows", "--beta")),
        "data": f"recorded conversations, sha256 of their tokens {str(settings.get('--data', MISSING))[:16]}",
        "optimizer steps": f"{records[-1]['step']:.0f}" if records else MISSING,
    } | {text: MISSING if value is None else f"{value:.4f}" for text, value in values.items()}


def _last(records: Sequence[Record], name: str) -> float | None:
    """The value of the newest record that has one."""
    return next((record[name] for record in reversed(records) if name in record), None)


def _held_out(evaluations: Sequence[Record]) -> str:
    if not evaluations:
        return MISSING
    newest = evaluations[-1]
    sampled, number, step = newest["eval/success_sampled"], round(newest["eval/num_tasks"]), round(newest["step"])
    low, high = wilson(sampled, number)
    return f"{sampled:.3f} (95 % interval {low:.3f} to {high:.3f}) of {number} tasks, sampled, at step {step}"


def _differences(config: Config, sections: Sequence[str]) -> Iterator[str]:
    """The keys of the published sections whose values are not the default, one a line."""
    usual = Config()
    for key in key_paths():
        value = value_of(config, key)
        if key.partition(".")[0] in sections and key not in HIDDEN and value != value_of(usual, key):
            yield f"{key}: {json.dumps(_public(value), default=str)}"


def _public(value: Any) -> Any:
    """The value without folders, addresses and commands of this machine: the last part of a path, and no URL."""
    if isinstance(value, Mapping):
        return {str(name): _public(each) for name, each in value.items() if name != "server_command"}
    if isinstance(value, list | tuple):
        return [_public(each) for each in value]
    if isinstance(value, str):
        if _ADDRESS.match(value):
            return "(an address)"
        return PurePath(value).name if value.startswith(("/", "~", ".")) else value
    return value


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
