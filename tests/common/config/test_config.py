"""The configuration: every key has a comment, every mistake an answer that names the key and what to do."""

import argparse
import contextlib
import dataclasses
import inspect
import json
import re
from pathlib import Path

import pytest

from slipstream.common.config.config import Config, differences, dump_config, load_config
from slipstream.common.config.env_config import EnvConfig, MixtureEntry
from slipstream.common.config.model_config import LoraConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.learner.fit.fit_options import FitOptions
from slipstream.learner.objective.coherence import check_coherence
from slipstream.tools.cli.cli import main
from slipstream.tools.run.check_input import check_env
from slipstream.tools.terminal.options import options_of

QUICKSTART = str(Path(__file__).parents[3] / "conf" / "quickstart.yaml")


def test_later_files_go_over_earlier_ones_and_overrides_over_all_with_lists_that_stay_lists(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("replay:\n  group_size: 4\n  groups_per_step: 2\n  max_lag: 7\nenv: {options: {profile: full}}\n")
    second.write_text("replay: {group_size: 5, max_lag: 9}\n")
    overrides = ["replay.group_size=6", "optim.lr=3e-5", "env.options.profile=small", "env.options.task_types=[a]"]
    config = load_config(str(first), overrides, presets=[str(second)])
    assert (config.replay.group_size, config.replay.groups_per_step, config.replay.max_lag) == (6, 2, 9)
    assert (config.optim.lr, config.env.options) == (3e-5, {"profile": "small", "task_types": ["a"]})


def test_the_defaults_are_a_configuration_and_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(str(tmp_path / "empty.yaml"), []) == load_config(None, []) == Config()


def test_what_is_printed_of_several_files_is_loaded_equally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = str(Path(QUICKSTART).parent / "objective" / "gspo.yaml")
    assert main(["up", QUICKSTART, preset, "run.name=other", "optim.lr=0.25", "--print-config"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    config = load_config(str(printed), [])
    assert (config.env.name, config.objective.surrogate, config.run.name) == ("shop", "gspo", "other")
    assert config == load_config(QUICKSTART, ["run.name=other", "optim.lr=0.25"], presets=[preset])
    assert dump_config(config) == printed.read_text()


RECIPES = sorted(Path(QUICKSTART).parent.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_accepted_as_the_learner_accepts_it(path: Path, tmp_path: Path) -> None:
    config = load_config(str(path), [])
    if config.env.name == "dataset":  # its file is written by a command that the recipe names
        config.env.options["train"] = str(tmp_path / "rows.jsonl")
        rows = [json.dumps({"prompt": f"What is {number} + 1?", "answer": number + 1}) for number in range(2000)]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    check_coherence(config)
    check_env(config.env)


@pytest.mark.parametrize("path", [path for path in RECIPES if path.stem.count("_") == 2], ids=lambda path: path.stem)
def test_a_recipe_for_a_real_model_is_named_so_and_says_whether_it_was_run(path: Path) -> None:
    config, (task, model, hardware) = load_config(str(path), []), path.stem.split("_")
    played = Path(config.env.options["train"]).stem if config.env.name == "dataset" else config.env.name
    assert played == task and config.run.name == path.stem
    assert model.replace(".", "").replace("-", "") in config.model.path.lower().replace(".", "").replace("-", "")
    num_gpus = int(hardware.partition("x")[0])
    together = config.actors.count * config.actors.tensor_parallel
    on_hosts = 0 if config.actors.instance_kind == "spot" else together
    assert num_gpus == (config.learner.ranks + on_hosts if num_gpus > 1 else 1)
    assert path.read_text().splitlines()[1].startswith(("# Never run on this hardware.", "# Run for "))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ("replay.group_sise=4", "unknown config key `replay.group_sise`; did you mean `replay.group_size`?"),
        ("group_size=4", "unknown config key `group_size`; did you mean `replay.group_size`?"),
        ("envs.name=shop", "unknown config key `envs`; did you mean `env`?"),
        ("objective=gspo", "a preset is a file, such as conf/objective/gspo.yaml"),
        ("learner.lr=1e-4", "unknown config key `learner.lr`; did you mean `optim.lr`?"),
        ("model.lora.rnk=4", "did you mean `model.lora.rank`?"),
        ("qwertyuiop=1", "`slipstream --help all` lists every key"),
        ("run.=1", "`run.` has no key after its dot; name one, such as `run.name`"),
        ("model.template_arguments.2x=1", "`model.template_arguments.2x` must be a name"),
        ("model.template_arguments.x=.inf", "`model.template_arguments.x` must be "),
        ("model.history=kept", "`model.history`: Invalid value 'kept', expected one of"),
        (f"run.seed={2**63}", "`run.seed` must be >= 0 and < 2**63, got "),
        ("replay.group_size=many", "`replay.group_size`: Value 'many'"),
        ("learner.activation_checkpointing=perhaps", "`learner.activation_checkpointing`: Value 'perhaps'"),
        ("run.name=", "for field of type 'str'; give the key a value of that type, or remove it"),
        ("run.name=a/b", "`run.name` must be 1 to 64 letters, digits, '.', '_' or '-', got 'a/b'; choose another name"),
        ("optim.max_grad_norm=0", "`optim.max_grad_norm` must be > 0, got 0.0; inf never clips"),
        ("sampling.top_p=0.9", "`sampling.top_k` must be > 0 where sampling.top_p is below 1, got 0; the kept set"),
        ("sampling.top_k=1", "`sampling.top_k` must be 0, or in [2, 256], got 1"),
        ("sampling.max_thought_tokens=32", "must be 0, or below sampling.max_turn_tokens = 32, got 32"),
        ("sampling.max_thought_tokens=-1", "`sampling.max_thought_tokens` must be 0, or below"),
        (
            "replay.group_size=1",
            "`replay.group_size` must be >= 2 with objective.advantage group_standardised, got 1; it compares the"
            " members of a group",
        ),
        ("replay.max_lag=-3", "`replay.max_lag` must be >= 0, got -3; 8 is the default: optimizer steps"),
        ("objective.correction=clip", "`objective.correction` must be none, token_mask or module:function, got 'clip'"),
        ("objective.advantage=siblings", "vtrace or module:function, got 'siblings'; try group_standardised first"),
        ("objective.surrogate=vtrace", "policy_gradient or module:function, got 'vtrace'; try ppo_clip first"),
        ("objective.mask_low=1.5", "must be below and above 1, got (1.5, 5.0); 0.5 and 5 are usual"),
        (
            "objective.token_mask_high=1.1",
            "unknown config key `objective.token_mask_high`; did you mean `objective.mask_high`?",
        ),
        ("fit.held_out=0", "`fit` is no section: its keys are options of a verb; use `slipstream fit sft --held-out`"),
        ("objective.dual_clip=1.1", "`objective.dual_clip` must be 0, or > 1 + objective.clip_high = 1.28, got 1.1"),
        ("objective.ratio_high=0.5", "`objective.ratio_high` must be > 1, got 0.5; 5 is usual"),
        ("optim.lr=nan", "`optim.lr` must be finite, got nan"),
        *((f"learner.steps={10**digits}", "`learner.steps` must be below 2**63, got 1") for digits in (19, 400)),
        ("actors.notices=hetzner", "`actors.notices` must be none, aws, gcp or azure, got 'hetzner'"),
        ("env.mixture.a.name=kg env.name=grid", "`env.name` must be left out with env.mixture (a), got 'grid'"),
        ("env.mixture.a.name=kg env.options.hops=1", "env.mixture.LABEL.options; env.mixture={} removes them all"),
        ("model.lora.alpha=64", "`model.lora.alpha` must be left out with model.lora.rank 0, got 64"),
        # Sections that contradict each other.
        (
            "env.mixture.a.name=kg env.mixture.b.name=grid eval.num_tasks=1",
            "`eval.num_tasks` must be 0, or >= 2, the number of environments in env.mixture, got 1",
        ),
        (
            "objective.advantage=reinforce_pp replay.group_size=1 replay.groups_per_step=1",
            "`replay.groups_per_step` must be >= 2 with objective.advantage reinforce_pp and replay.group_size 1, got",
        ),
        (
            "replay.max_lag=1",
            "`replay.max_lag` must be >= replay.target_lag + learner.publish_every + replay.max_uses - 2 = 2",
        ),
        (
            "replay.max_uses=8",
            "learner.publish_every + replay.max_uses - 2 = 9, got 8; a lower value would leave out tokens",
        ),
        ("learner.publish_every=8", "learner.publish_every + replay.max_uses - 2 = 9, got 8"),
        (
            "sampling.top_k=200 model.max_tokens=8192",
            "`sampling.top_k` must be at most 128 with model.max_tokens = 8192, got 200; an episode records the kept",
        ),
        (
            "model.context=sumary",
            "`model.context` must be stop, window, summary, or module:function for your own, got 'sum",
        ),
        ("model.context=window model.history=sampled", "must be template with model.context=window"),
        ("model.context=window sampling.max_turn_tokens=129", "at most model.max_tokens / 4 = 128 with model.cont"),
        ("sampling.max_turn_tokens=512", "`sampling.max_turn_tokens` must be < model.max_tokens = 512, got 512"),
        ("model.max_tokens=4096", "`learner.micro_batch_tokens` must be >= model.max_tokens = 4096, got 2048"),
    ],
)
def test_a_mistake_is_answered_with_the_key_the_value_and_the_cure(overrides: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, overrides.split())
    assert complaint in str(raised.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no config file at conf/nowhere\.yaml; those that come with Slipstream"):
        load_config("conf/nowhere.yaml", [])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("replay: [1, 2", "cannot read "),
        ("- a\n- b\n", "cannot read "),
        ("replay: 3\n", "set a key of the section, as in env.name=shop"),
        ("just words\n", "just words"),
        ("env: {rewards: [short]}", "`env.rewards` must be a mapping of keys, got ['short']; correct it (in "),
        ("env: {mixture: [a]}", "`env.mixture` must be a mapping of keys, got ['a']"),
        ("run: [a]", "`run` must be a mapping of keys, got ['a']"),
        ("actors: {devices: {a: 1}}", "`actors.devices` must be a list, got {'a': 1}"),
        ("model.lora.rank: 4", "`model.lora.rank` is written in a file as `model: {lora: {rank: ...}}`; nest it so"),
        ("launch: {cpus: 4}", "`launch` is no section: its keys are options of a verb; use `slipstream launch --help`"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load_config(str(path), [])


def test_a_mistake_on_the_command_line_ends_with_code_2_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "replay.groop_size=4"]) == 2
    said = capsys.readouterr()
    assert said.err == ("slipstream up: unknown config key `replay.groop_size`; did you mean `replay.group_size`?\n")
    assert said.out == ""


def test_every_key_has_a_comment() -> None:
    sections = [Config, MixtureEntry]
    for section in sections:
        source = inspect.getsource(section)
        for item in dataclasses.fields(section):
            if isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
                sections.append(item.type)
            else:
                assert re.search(rf"^    {item.name}: .*  # \w.{{4,}}$", source, re.MULTILINE), (section, item.name)
    assert LoraConfig in sections


def test_another_environment_begins_without_the_options_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("env:\n  name: shop\n  options: {profile: small}\n")
    (tmp_path / "own.yaml").write_text("env:\n  name: own:Env\n")
    path = str(tmp_path / "run.yaml")
    assert load_config(path, ["env.options.people=3"]).env.options == {"profile": "small", "people": 3}
    assert load_config(path, ["env.name=own:Env", "env.options.people=3"]).env.options == {"people": 3}
    assert load_config(path, [], presets=[str(tmp_path / "own.yaml")]).env.options == {}
    assert load_config(path, ["env.name=shop"]).env.options == {"profile": "small"}


def test_an_empty_mapping_replaces_and_a_renamed_entry_begins_without_options() -> None:
    def env_of(*overrides: str) -> EnvConfig:
        return load_config("conf/mixture.yaml", list(overrides)).env

    assert env_of("env.mixture={}", "env.name=grid", "env.options.size=4").entries().keys() == {"grid"}
    assert env_of("env.mixture.household.name=kg").mixture["household"].options == {}
    assert env_of("env.mixture.household.weight=1").mixture["household"].options["profile"] == "small"
    assert load_config("conf/quickstart.yaml", ["env.options={}"]).env.options == {}
    assert load_config("conf/quickstart.yaml", ["env={}"]).env.options == {"profile": "small"}  # a section


def test_of_two_presets_of_the_objective_what_one_sets_would_remain_in_the_other() -> None:
    presets = ["conf/objective/grpo.yaml", "conf/objective/dapo.yaml"]
    with pytest.raises(ConfigError, match=r"grpo\.yaml and conf/objective/dapo\.yaml are presets of"):
        load_config("conf/quickstart.yaml", [], presets=presets)


def test_differences_are_told_by_key() -> None:
    now = load_config(None, ["learner.steps=7", "env.options.people=3", "model.lora.rank=6"])
    found = differences(Config(), now)
    assert found == ["model.lora.rank: 0 -> 6", "env.options: {} -> {'people': 3}", "learner.steps: 100 -> 7"]
    assert differences(now, now) == []


@pytest.mark.parametrize("advantage", ["gae", "reinforce_pp"])
def test_where_no_siblings_are_compared_a_group_may_be_one(advantage: str) -> None:
    assert load_config(None, ["replay.group_size=1", f"objective.advantage={advantage}"]).replay.group_size == 1


def test_a_wrong_value_names_the_file_that_it_is_in_unless_the_command_line_is_at_fault(tmp_path: Path) -> None:
    good, wrong = tmp_path / "good.yaml", tmp_path / "wrong.yaml"
    good.write_text("optim: {lr: 0.1}")
    wrong.write_text("optim: {lr: -1}")
    with pytest.raises(ConfigError, match=r"`optim\.lr` must be .* \(in .*good\.yaml and .*wrong\.yaml\)$"):
        load_config(str(good), ["run.name=one"], presets=[str(wrong)])
    with pytest.raises(ConfigError) as at_fault:
        load_config(str(good), ["optim.lr=-1"])
    assert "good.yaml" not in str(at_fault.value)


@pytest.mark.parametrize(
    "name",
    [
        *("010", "1e3", "true", "2026-11-28"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("1.10", "0x1f", "1_000", "on", "12.30", "a.b-1")),
    ],
)
def test_a_text_stays_as_it_is_written_where_yaml_reads_a_number(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.yaml").write_text(f"run:\n  name: {name}\nactors: {{count: 2}}\nweights: {{host: {name}}}\n")
    for config in (
        load_config(str(tmp_path / "run.yaml"), []),
        load_config(None, [f"run.name={name}", f"weights.host={name}", "actors.count=2"]),
    ):
        assert (config.run.name, config.weights.host, config.actors.count) == (name, name, 2)
        (tmp_path / "dumped.yaml").write_text(dump_config(config))
        assert load_config(str(tmp_path / "dumped.yaml"), []).run.name == name


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("actors.count=010", r"`actors\.count`: YAML reads 010 as 8; write 8, or for a text \"'010'\""),
        ("optim.lr=1:30", r"`optim\.lr`: YAML reads 1:30 as 90; write 90"),
        ("env.options={start: 1:30}", r"`env\.options\.start`: YAML reads 1:30 as 90"),
        ("eval.num_tasks=0b11", r"reads 0b11 as 3"),
        ("learner.steps=1_000", None),
        ("optim.lr=1e-3", None),
        ("env.options={start: '1:30', size: 12345678901234567890123}", None),
    ],
)
def test_a_number_that_yaml_reads_as_another_one_is_refused(tmp_path: Path, setting: str, said: str | None) -> None:
    section, _, rest = setting.partition(".")
    key, _, value = rest.partition("=")
    (tmp_path / "a.yaml").write_text(f"{section}:\n  {key}: {value}\n")
    for path, overrides in ((str(tmp_path / "a.yaml"), list[str]()), (None, [setting])):
        with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
            load_config(path, overrides)


def test_a_leading_tilde_is_the_home_folder_in_settings_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    mixture = "env.mixture.a={name: dataset, options: {train: ~/rows.jsonl, columns: [~/b, a~/c]}}"
    config = load_config(None, ["model.path=~/models/a", mixture])
    assert config.model.path == "/home/me/models/a"
    assert config.env.mixture["a"].options == {"train": "/home/me/rows.jsonl", "columns": ["/home/me/b", "a~/c"]}
    options = options_of(FitOptions, argparse.Namespace(**dataclasses.asdict(FitOptions(data="~/rows.jsonl"))))
    assert options.data == "/home/me/rows.jsonl"
