"""The command line: help, settings from files and overrides, and what every verb does with them."""

import functools
import inspect
import os
import re
from pathlib import Path

import pytest
import yaml

from slipstream.common.config import suggestion
from slipstream.common.config.config import key_paths, load_config
from slipstream.common.process.connection import PASSWORD_VARIABLE
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.tools.cli.cli import _parser, main, parsed, setting
from slipstream.tools.cli.verb_table import GROUPS, VERBS, called
from slipstream.tools.lab.loopback_server import start_server
from slipstream.tools.run.collect_options import CollectOptions
from slipstream.tools.run.doctor import check_machine, print_missing
from slipstream.tools.serve.serve_options import EnvsOptions
from slipstream.tools.terminal.options import as_arguments, options_of
from tests.tools.cli.verbs import Output

REPOSITORY = Path(__file__).parents[3]
OPERANDS = dict.fromkeys(("init env", "init agent", "init data"), "mine")
OPERANDS |= dict.fromkeys(("replay export", "collect", "data"), "rows.jsonl")
OPERANDS |= {"replay show": "1", "replay quarantine": "1 --reason=damaged", "replay requeue": "1 2"}
OPERANDS |= {"launch": "ray", "serve rewards": "folder"}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*words])
    printed = capsys.readouterr()
    assert (ended.value.code == 0) is (printed.err == "")
    return printed.out + printed.err


def test_help_lists_every_key_with_its_default_and_its_comment(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(capsys, "--help", "all").split())
    keys = [f"{path} = " for path in key_paths()]
    assert len(keys) > 60 and [key for key in keys if key not in text] == []
    assert "replay.max_lag = 8 optimizer steps; older tokens are left out of the loss" in text
    assert "weights.host = '127.0.0.1' address that the publisher or a relay binds to; auto: the" in text
    starts = sorted(text.index(key) for key in keys)
    for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
        assert len(text[start:stop].split()) > 3, f"no comment: {text[start:stop]}"


def test_all_verbs_fit_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    verbs = [line[8:17].strip() for line in lines[1:-1]]
    assert verbs == [verb for group in GROUPS.values() for verb in group]
    assert set(verbs) == {verb.split()[0] for verb in VERBS} and len(verbs) <= 22
    assert shown(capsys, "--help").splitlines() == lines


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_lists_exactly_the_settings_that_it_reads_and_its_own_options(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words, sections = verb.split(), VERBS[verb].settings
    about = shown(capsys, *words, "--help")
    assert max(map(len, about.splitlines())) <= 80
    assert [path for path in key_paths() if f"{path} = " in about] == []
    has_options_of_a_fit = "pairs of conversations, in one optimizer step (default: 32)" in " ".join(about.split())
    assert has_options_of_a_fit is (words[0] == "fit")
    if not sections:
        return
    listed = re.findall(r"^  ([a-z0-9_.]+) = ", shown(capsys, *words, "--help", "all"), re.MULTILINE)
    assert listed == [path for path in key_paths() if any(f"{path}.".startswith(f"{section}.") for section in sections)]
    assert [section for section in sections if not any(f"{path}.".startswith(f"{section}.") for path in listed)] == []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--help", "optim"], "  optim.lr = 1e-06  peak learning rate of AdamW"),
        (["up", "--help", "optim"], "  optim.lr = 1e-06  peak learning rate of AdamW"),
        (["up", "--help", "optim.lr=1e-5"], "  optim.lr = 1e-06  peak learning rate of AdamW"),
        (["--help", "optm"], "no settings under `optm`; did you mean `optim`?"),
        (["--help", "learning_rate"], "no settings under `learning_rate`; did you mean `optim.lr`?"),
        (["--help", "top"], "usage: slipstream top"),
        (["fit", "--help"], "slipstream fit sft: fine-tune model.path"),
        (["evla"], "no verb `evla`; did you mean `eval`?"),
        (["train", "conf/quickstart.yaml"], "no verb `train`; did you mean `up`?"),
        (["sft"], "no verb `sft`; did you mean `fit sft`?"),
        (["fit"], "`slipstream fit` takes one of sft, dpo, reward, prm, got nothing"),
        (["serve", "env"], "takes one of envs, rewards, relay, judge, got `env`; did you mean `envs`?"),
        (["up", "--lr", "1e-5"], "slipstream up: error: no option --lr; did you mean `optim.lr`?"),
        (["up", "--learning-rate=1e-5"], "no option --learning-rate=1e-5; did you mean `optim.lr`?"),
        (["up", "--adv-estimator=rloo"], "did you mean `objective.advantage=leave_one_out`?"),
        (["top", "--onec"], "no option --onec; did you mean `--once`?"),
    ],
)
def test_help_finds_a_word_or_suggests_one(words: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert found in shown(capsys, *words)


def test_each_suggestion_exists() -> None:
    paths = [*key_paths(), "env.options.train"]
    assert [key for key in [*suggestion.SETTINGS.values(), *suggestion.VALUES] if key not in paths] == []
    assert [word for word in suggestion.SETTINGS if word in {path.rsplit(".", 1)[-1] for path in key_paths()}] == []
    for key, values in suggestion.VALUES.items():
        for value in values.values():
            more = ["objective.critic=own"] if value == "gae" else []
            assert load_config(None, [f"{key}={value}", *more])
    verbs = {word for verb in VERBS for word in (verb, verb.split()[0])}
    assert {" ".join(verb.split()[:1]) for verb in suggestion.VERBS.values()} <= verbs
    assert {verb for verb in suggestion.VERBS.values() if "--" not in verb} <= verbs


@pytest.mark.parametrize("verb", [verb for verb in VERBS if VERBS[verb].joins and not VERBS[verb].of_runs])
def test_a_verb_takes_a_runs_name_or_its_folder(verb: str, tmp_path: Path, printed: Output, refused: Output) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run: {{name: mine, root: {tmp_path}}}\nlearner: {{steps: 77}}\n")
    root, words = f"run.root={tmp_path}", [*verb.split(), *OPERANDS.get(verb, "").split()]
    for about in ([*words, "mine", root], [*words, str(folder)], [*words, "run.name=mine", root]):
        said = printed(*about, "--print-config")
        assert "steps: 77" in said and "name: mine" in said and f"root: {tmp_path}" in said
    if "path" in VERBS[verb].arguments:
        among = ["env.options.train=a.jsonl", "mine", "rows.jsonl", root]
        assert "steps: 77" in printed(*verb.split(), *among, "--print-config")
    assert f"slipstream {verb}: no run 'yours' under {tmp_path}/; existing runs: mine" in refused(*words, "yours", root)
    assert "name: yours" in printed(*words, "yours", root, "redis.url=redis://elsewhere", "--print-config")
    assert "give the name of one run" in refused(*words, "mine", "other", root)


@pytest.mark.parametrize("verb", [["up", "--resume"], ["learner", "--replay-archive"], ["eval"], ["top"]])
def test_a_run_that_was_moved_is_read_where_it_is_and_a_copy_is_no_run(
    verb: list[str], tmp_path: Path, printed: Output, refused: Output
) -> None:
    """Its configuration says where it was, and how it was called. A road quotes what it sets."""
    (folder := tmp_path / "it's new" / "mine").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run: {{name: mine, root: {tmp_path / 'old'}}}\nlearner: {{steps: 77}}\n")
    for words in ([str(folder)], ["mine", f"run.root={folder.parent}"], ["mine", setting("run.root", folder.parent)]):
        said = yaml.safe_load(printed(*verb, *words, "--print-config"))
        assert (said["learner"]["steps"], said["run"]["root"]) == (77, str(folder.parent))
    if "--replay-archive" not in verb:
        complaint = "got the run mine and run.name=other, another one; leave one of them"
        assert complaint in refused(*verb, str(folder), "run.name=other")
    copy = folder.rename(folder.parent / "copy")
    complaint = f"{copy} is a copy of the run 'mine', or was renamed; name the folder mine"
    for words in ([str(copy)], ["copy", f"run.root={folder.parent}"]):
        assert complaint in refused(*verb, *words, "--print-config")


def test_up_says_how_a_run_is_continued(tmp_path: Path, refused: Output) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    root = f"run.root={tmp_path}"
    assert "`mine` is a run; `slipstream up --resume mine` continues it" in refused("up", "mine", root)
    complaint = "no config file at conf/quickstrat.yaml; did you mean conf/quickstart.yaml? Those that"
    assert complaint in refused("up", "conf/quickstrat.yaml")


def test_every_setting_is_read_by_a_verb() -> None:
    sections = {section for verb in VERBS.values() for section in verb.settings}
    read = [path for path in key_paths() if any(f"{path}.".startswith(f"{section}.") for section in sections)]
    assert read == key_paths()


def test_every_option_of_every_verb_has_a_description() -> None:
    bare = [
        f"{verb} {action.option_strings or action.dest}"
        for verb in VERBS
        for action in _parser(verb)._actions
        if not re.sub(r"\(default: .*\)$", "", action.help or "").strip()
    ]
    assert bare == []


@pytest.mark.parametrize("verb", VERBS)
def test_the_options_of_a_verb_are_the_arguments_of_its_function(verb: str) -> None:
    run = called(parsed([*verb.split(), *OPERANDS.get(verb, "").split()]))
    assert isinstance(run, functools.partial)
    options = list(inspect.signature(run.func).parameters)[1:]
    assert sorted(run.keywords) == sorted(options)


@pytest.mark.parametrize(
    ("verb", "given"),
    [
        ("fit sft", FitOptions(data="a b.jsonl", min_return=-1.5)),
        ("collect", CollectOptions(search="mcts", budget=9)),
        ("serve envs", EnvsOptions(names=("kg", "my.envs:Maze"), lease_s=5.0)),
    ],
)
def test_the_own_options_of_a_verb_are_written_as_they_are_read(verb: str, given: object) -> None:
    arguments = parsed([*verb.split(), *OPERANDS.get(verb, "").split(), *as_arguments(given), "run.name=x"])
    assert options_of(type(given), arguments) == given
    assert arguments.settings == ["run.name=x"]


def test_the_printed_configuration_can_be_fed_back(tmp_path: Path, printed: Output) -> None:
    quickstart = str(REPOSITORY / "conf" / "quickstart.yaml")
    said = printed("up", quickstart, "--print-config", "learner.steps=7", "env.options.profile=full")
    assert "steps: 7" in said and "profile: full" in said and "groups_per_step: 8" in said
    (tmp_path / "again.yaml").write_text(said)
    assert printed("learner", str(tmp_path / "again.yaml"), "--print-config") == said


def test_the_printed_configuration_has_no_password(printed: Output) -> None:
    said = printed("actors", "redis.url=redis://user:s%2Fcret@host:6379/1", "--print-config")
    assert "url: redis://user@host:6379/1" in said and "cret" not in said
    assert os.environ[PASSWORD_VARIABLE] == "s/cret"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["learner.steps=9"], "quickstart"),
        (["run.name=mine"], "mine"),
        (["env.max_turns=3"], "run"),
        (["model.max_tokens=99"], "run"),
        (["conf/sums_smollm2.yaml"], "sums_smollm2"),
    ],
)
def test_up_without_a_task_or_a_model_is_the_quickstart(
    words: list[str], name: str, printed: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    said = printed("up", *words, "--print-config")
    assert f"name: {name}\n" in said and ("episodes: 2500" in said) is (name in ("quickstart", "mine"))


def test_a_dry_run_says_what_would_start_and_starts_nothing(tmp_path: Path, printed: Output) -> None:
    said = printed("up", "run.name=dry", "--dry-run", f"run.root={tmp_path}")
    assert [line.split(":")[0] for line in said.splitlines()] == ["redis", "GPUs", "learner", "actors", "tensorboard"]
    assert "redis: a server of its own" in said
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_tracked_by_the_packages_that_are_there_and_no_others(
    tmp_path: Path, printed: Output, refused: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = ["up", "run.name=dry", "--dry-run", f"run.root={tmp_path / 'runs'}", "--wandb", "--mlflow"]
    assert "--wandb needs the package wandb: `pip install wandb`" in refused(*dry)
    for to in ("wandb", "mlflow"):
        (tmp_path / f"{to}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    last = printed(*dry).splitlines()[-2:]
    assert [line.partition(":")[0] for line in last] == ["wandb", "mlflow"]
    assert all(f" track {tmp_path / 'runs' / 'dry' / 'config.yaml'} --to " in line for line in last)


def test_a_verb_begins_with_its_runs_config_and_password(tmp_path: Path, printed: Output, refused: Output) -> None:
    with start_server(tmp_path / "mine" / "redis") as server:
        text = f"run: {{name: mine, root: {tmp_path}}}\nredis: {{url: '{server.url}'}}\nlearner: {{steps: 77}}\n"
        (tmp_path / "mine" / "config.yaml").write_text(text)
        here = ["run.name=mine", f"run.root={tmp_path}"]
        assert "steps: 77" in printed("top", *here, "--print-config")
        # It reaches the server, which wants a password, and finds no run there yet.
        assert "`run.name` mine is not on this Redis server; it has no runs" in refused("top", *here)


def test_what_an_interrupted_pip_leaves_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    check_machine()


def test_doctor_finds_nothing_missing_here_and_says_so_when_redis_does_not_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "redis.url=redis://127.0.0.1:1"]) == 1
    said = capsys.readouterr().out
    assert "redis: MISSING: `redis.url` redis://127.0.0.1:1 does not answer" in said
    assert "packages: all installed" in said


def test_after_a_death_at_the_start_only_what_is_missing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_missing(load_config(None, ["redis.url=redis://127.0.0.1:1"]))
    title, *rows = capsys.readouterr().out.splitlines()
    assert title == "Slipstream doctor"
    assert "  redis: MISSING: `redis.url` redis://127.0.0.1:1 does not answer" in rows[0]
    assert all("MISSING" in row for row in rows)


@pytest.mark.parametrize("verb", ["collect", "replay export"])
@pytest.mark.parametrize("place", range(3))
def test_file_may_stand_anywhere_among_the_run_and_its_settings(verb: str, place: int) -> None:
    url = "redis.url=redis://:p%40w@host:6379"  # with slashes that a path would lose
    words = ["demo", url]
    arguments = parsed([*verb.split(), *words[:place], "out.jsonl", *words[place:]])
    assert (arguments.path, arguments.settings) == (Path("out.jsonl"), words)
    arguments = parsed([*verb.split(), *words[:place], "runs/lr=1e-6/out.csv", *words[place:]])
    assert arguments.path == Path("runs/lr=1e-6/out.csv"), "which is refused by its own name"
