"""`slipstream export`: the card that it writes, and the upload, against a stand-in of the Hub on loopback."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.config.config import dump_config, load_config
from slipstream.common.process.run_dir import RunDir
from slipstream.tools.cli.cli import main
from slipstream.tools.run.model_card import card_of
from tests.http_stand_in import Asked, HttpStandIn, Reply
from tests.processes import Done
from tests.tools.cli.verbs import ASCII_LOCALE, Output, slipstream

PRODUCED = {"produced/episodes": 64, "produced/success": 0.5, "produced/reward": 0.5}
STEP = {"step": 7, "trained/reward": 0.5, "lag/mean": 1.25, "lag/max": 3, **PRODUCED}
EVALUATION = {"step": 7, "eval/success_sampled": 0.8, "eval/success_greedy": 0.9, "eval/num_tasks": 100}
SETTINGS = ["env.name=dataset", "env.max_turns=1", "env.options={train: /home/me/secret/sums.jsonl}", "optim.lr=5e-5"]
SETTINGS += ["learner.ranks=2", "learner.hosts=2", "learner.rendezvous=10.0.0.9:29500", "redis.url=redis://10.0.0.8"]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path, "mine")
    made.create()
    judge = "env.rewards={good: {part: judge, url: 'http://10.0.0.7:8000/v1', model: m, rubric: /home/me/rubric.yaml}}"
    config = load_config(None, [*SETTINGS, judge, f"run.root={tmp_path}", "run.name=mine"])
    config.model.path = "/home/me/hub/models--Qwen--Qwen3-0.6B/snapshots/0123456789abcdef/"
    made.config.write_text(dump_config(config))
    made.metrics.write_text("".join(json.dumps(record) + "\n" for record in (STEP, EVALUATION)))
    made.trained_model.mkdir()
    (made.trained_model / "model.safetensors").write_bytes(b"\0" * 64)
    (made.trained_model / "config.json").write_text("{}")
    (made.path / "export_check.txt").write_text("loaded by transformers 5.0, differs at “é”\n", encoding="utf-8")
    (made.trained_model / "notes.pkl").write_bytes(b"never uploaded")
    return made


def export(run_dir: RunDir, *options: str, **variables: str) -> Done:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(run_dir.path.parent / "no-token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            patch.delenv(name, raising=False)
        return slipstream("export", f"run.root={run_dir.path.parent}", "run.name=mine", *options, **variables)


def test_the_card_has_the_runs_own_numbers_and_nothing_of_its_hosts(run_dir: RunDir) -> None:
    done = export(run_dir, **ASCII_LOCALE)
    assert (done.returncode, done.stdout.strip()) == (0, str(run_dir.trained_model)), done.stderr
    card = (run_dir.trained_model / "README.md").read_text(encoding="utf-8")
    assert "base_model: Qwen/Qwen3-0.6B\n" in card
    for row in (
        "| base model | Qwen/Qwen3-0.6B at 0123456789ab |",
        '| environments | dataset: {"train": "sums.jsonl"} |',
        "| optimizer steps | 7 |",
        "| held-out success | 0.800 (95 % interval 0.711 to 0.867) of 100 tasks, sampled, at step 7 |",
        "| newest episodes | success 0.500 (0.38 to 0.62) reward 0.500, of 64 episodes |",
        "| lag at the last step | 1.2 optimizer steps, 3 at most |",
        "| tokens trained | not recorded |",
        "| loaded again | loaded by transformers 5.0, differs at “é” |",
    ):
        assert row in card
    assert "optim.lr: 5e-05" in card and '"url": "(an address)"' in card
    assert [each for each in ("/home/me", "10.0.0", "redis", "secret") if each in card] == []


def test_a_command_of_this_machine_is_not_on_the_card(run_dir: RunDir) -> None:
    command = "python /home/me/serve.py --host 10.0.0.9"
    options = f"env.options={{url: 'http://10.0.0.9:7365', env: shop, server_command: '{command}'}}"
    run_dir.config.write_text(dump_config(load_config(None, ["env.name=remote", options, "run.name=mine"])))
    card = card_of(run_dir)
    assert '{"url": "(an address)", "env": "shop"}' in card and "serve.py" not in card and "10.0.0.9" not in card


def test_the_card_of_a_fit_has_its_losses_and_no_environment(run_dir: RunDir) -> None:
    (run_dir.path / "fit.json").write_text(json.dumps({"goal": "dpo", "--data": "ab" * 32, "--epochs": 2}))
    records = [{"step": 1, "fit/loss": 0.69}, {"step": 2, "fit/loss": 0.5, "fit/held_out_accuracy": 0.75}]
    run_dir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    card = card_of(run_dir)
    assert "| optimizer steps | 2 |" in card and "| loss of the last step | 0.5000 |" in card
    assert "| held-out accuracy | 0.7500 |" in card and "| held-out loss | not recorded |" in card
    assert "goal dpo" in card and "env." not in card
    assert "tags: [slipstream]" in card
    with run_dir.metrics.open("a") as metrics:
        metrics.write(json.dumps({"step": 3, "fit/loss": None}) + "\n")  # it was not finite
    assert "| loss of the last step | nan |" in card_of(run_dir)


def test_a_run_without_a_model_and_an_upload_without_a_token_are_refused_and_a_card_is_kept(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], refused: Output
) -> None:
    done = export(run_dir, "--to-hub", "maker/mine")
    assert done.returncode == 2 and "`--to-hub` maker/mine needs a token that may write; set HF_TOKEN" in done.stderr
    assert (run_dir.trained_model / "README.md").exists()
    here = ["export", f"run.root={run_dir.path.parent}", "run.name=mine"]
    assert "`--to-hub` must be like maker/name, got 'mine'" in refused(*here, "--to-hub", "mine")
    assert "`--public` must be off without --to-hub" in refused(*here, "--public")
    (run_dir.trained_model / "README.md").write_text("# My own\n")
    assert main(here) == 0 and (run_dir.trained_model / "README.md").read_text() == "# My own\n"
    assert "README.md is kept; delete it for a new one" in capsys.readouterr().err
    (run_dir.trained_model / "model.safetensors").unlink()
    command = f"slipstream up --resume mine run.root={run_dir.path.parent} learner.steps=7"
    assert f"trained_model has no *.safetensors; `{command}` writes it" in refused(*here)
    run_dir.config.write_text(dump_config(load_config(str(run_dir.config), ["run.rerun_of=first"])))
    assert f"; `slipstream learner mine run.root={run_dir.path.parent}` writes it" in refused(*here)


class Hub(HttpStandIn):
    """The requests of an upload of small files, as the Hub answers them. It keeps what was committed."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.tokens: set[str | None] = set()
        self.created: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        super().__init__(self._reply)

    def _reply(self, asked: Asked) -> Reply:
        self.paths.append(asked.path)
        found = self._answer(asked)
        status, value = (200, found) if found is not None else (403, {"error": f"unknown {asked.path}"})
        return status, {"Content-Type": "application/json"}, json.dumps(value).encode()

    def _answer(self, asked: Asked) -> Any:
        if asked.method == "GET":
            return {"siblings": [], "sha": "0" * 40, "id": "maker/mine"}
        self.tokens.add(asked.headers.get("Authorization"))
        if asked.path.endswith("/api/repos/create"):
            self.created = json.loads(asked.body)
            return {"url": f"{self.url}/maker/mine"}
        if asked.path.endswith("/api/validate-yaml"):
            return {"errors": [], "warnings": []}
        if "/preupload/" in asked.path:
            names = [each["path"] for each in json.loads(asked.body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in asked.path:
            for line in map(json.loads, asked.body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitUrl": f"{self.url}/maker/mine/commit/1", "commitOid": "1", "success": True}
        return None


def test_the_folder_is_uploaded_without_what_a_model_does_not_need(run_dir: RunDir) -> None:
    with Hub() as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        done = export(run_dir, "--to-hub", "maker/mine", **variables)
    assert done.returncode == 0, (done.stderr, hub.paths)
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors"}
    assert hub.files["README.md"] == (run_dir.trained_model / "README.md").read_bytes()
    assert hub.created["visibility"] == "private" and hub.tokens == {"Bearer hf_test"}
    assert "hf_test" not in done.stdout + done.stderr

    done = export(run_dir, "--to-hub", "maker/mine", **variables)  # the Hub is gone
    assert done.returncode == 2 and "`--to-hub` maker/mine was not uploaded: " in done.stderr
    assert "hf_test" not in done.stdout + done.stderr
