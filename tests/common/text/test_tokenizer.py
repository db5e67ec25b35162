"""Whose tokenizer and template an actor plays with, and that no code of a model's folder is ever run."""

import ast
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import redis
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.actors.host.host_parts import checked_tokenizer
from slipstream.common.config.config import Config
from slipstream.common.config.model_config import ModelConfig
from slipstream.common.process.config_error import ConfigError
from slipstream.common.text import pieces
from slipstream.common.text.codec import encoder
from slipstream.common.text.tokenizer import load_tokenizer, tokenizer_root
from slipstream.common.transfer.model_folder import model_files
from slipstream.learner.model.skeleton import skeleton_of
from slipstream.replay.fleet.fleet import Fleet, RunState
from slipstream.tools.run.prepare import load_tokenizer as load_chat_tokenizer
from slipstream.tools.run.tiny_model import TinyShape, make_tiny_model
from tests.replay.buffer.every_verb import FACTS
from tests.tools.run.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[3]
TINY = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    make_tiny_model(model, texts={"say one thing", "and another"}, shape=TINY, max_tokens=64, seed=0)
    return model


REPEATED = "{{% set ns = namespace(x={0}) %}}{{% for _ in range(40) %}}{{% set ns.x = ns.x {1} ns.x %}}{{% endfor %}}"
DOUBLED, SQUARED = REPEATED.format("'a'", "~"), REPEATED.format("10", "*")


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        ("{% if %}", {}),
        ("{{ nowhere() }}", {}),
        ("", {"messages": 3}),
        ("{{ 'a'.center(10**10) }}", {}),  # without a limit, all memory would be taken
        ("{{ 'a'.center(10**8) }}", {}),
        (DOUBLED, {}),
        ("{{ 10 ** (10**10) }}", {}),  # the interpreter would be held for hours, and so would the thread that waits
        ("{{ 'a' * 10**10 }}", {}),
        ("{{ 10**10 * [0] }}", {}),
        (SQUARED, {}),
        ("{% if messages[1:] %}{{ 'a'.center(10**10) }}{% endif %}", {}),
    ],
)
def test_a_template_that_cannot_be_rendered_is_named(folder: Path, template: str, arguments: dict[str, object]) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(template or path.read_text())
    with pytest.raises(ConfigError, match=r"`model.path` .*, with `model.template_arguments`, cannot be rendered: "):
        load_chat_tokenizer(folder, ModelConfig(template_arguments=arguments))


def test_a_template_may_multiply_what_is_small() -> None:
    template = ImmutableSandboxedEnvironment().from_string("{{ ['ab' * 2, 2 * [3], 3 * 4, 2**5, 2**-1, 1.5 * 2] }}")
    assert template.render() == "['abab', [3, 3], 12, 32, 0.5, 3.0]"


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("where", ["messages", "messages[1:]", "(messages[0].role == 'system') * [1]"])
def test_a_template_that_does_not_end_is_refused(where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TEMPLATE_S", 1.0)
    path = folder / "chat_template.jinja"
    path.write_text(f"{{% if {where} %}}{LOOP}{{% endif %}}{path.read_text()}")
    with pytest.raises(ConfigError, match=r"`model.path` .*: its chat template had not rendered .* after 1 s; correct"):
        load_chat_tokenizer(folder, ModelConfig())
    for thread in threading.enumerate():
        if thread.name == "template":
            thread.join(10.0)
            assert not thread.is_alive()


def test_a_template_may_refuse_a_conversation_without_a_system_message(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    demand = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    path.write_text(demand + path.read_text())
    assert load_chat_tokenizer(folder, ModelConfig()).chat_template == path.read_text()


@pytest.mark.parametrize(
    ("file", "changes"),
    [("tokenizer.json", {"unk_token": "[UNK]"}), ("tokenizer_config.json", {"model_max_length": "many"})],
)
def test_a_tokenizer_that_cannot_encode_every_text_is_refused(folder: Path, file: str, changes: dict[str, str]) -> None:
    edit(folder / file, within="model" if file == "tokenizer.json" else "", **changes)
    with pytest.raises(ConfigError, match=r"has no readable tokenizer or config.json: "):
        load_tokenizer(folder)


def edit(path: Path, *, within: str = "", **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    (content[within] if within else content).update(changes)
    path.write_text(json.dumps(content))


def other_template(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")


def other_vocabulary(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    first, second = [word for word in vocabulary if word.isalpha()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    edit(folder / "tokenizer.json", within="model", vocab=vocabulary)


OTHERS: dict[str, Callable[[Path], None]] = {
    "template": other_template,
    "vocabulary": other_vocabulary,
    "normaliser": lambda folder: edit(folder / "tokenizer.json", normalizer={"type": "Lowercase"}),
    "ends": lambda folder: edit(folder / "generation_config.json", eos_token_id=[1, 5]),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_another_tokenizer_is_refused_with_both_hashes_and_cure(folder: Path, change: Callable[[Path], None]) -> None:
    learners = tokenizer_root(load_tokenizer(folder))
    facts = msgspec.structs.replace(FACTS, model_path=str(folder), tokenizer_root=learners)
    assert tokenizer_root(checked_tokenizer(facts, Config(), folder)) == learners
    change(folder)
    mine = tokenizer_root(load_tokenizer(folder))
    complaint = f"its hash is {mine}, the learner's is {learners}; its files are the learner's"
    with pytest.raises(ConfigError, match=complaint):
        checked_tokenizer(facts, Config(), folder)


def test_a_tokenizer_that_was_saved_again_or_used_has_the_same_hash(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    root = tokenizer_root(tokenizer)
    tokenizer.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "generation_config.json").write_bytes((folder / "generation_config.json").read_bytes())
    encoder(tokenizer)("say one thing")
    tokenizer("say one thing", truncation=True, max_length=1)
    assert {tokenizer_root(tokenizer), tokenizer_root(load_tokenizer(tmp_path / "again"))} == {root}


def test_an_actor_process_that_loads_another_tokenizer_from_the_same_files_does_not_join(
    redis_url: str, redis_client: redis.Redis, run_id: str, folder: Path
) -> None:
    """As with another version of the tokenizers library: here the learner has described another hash."""
    fleet = Fleet(redis_client, run_id)
    files = model_files(folder, with_weights=False)
    config_yaml = f"run: {{name: {run_id}}}\n"
    facts = msgspec.structs.replace(FACTS, config_yaml=config_yaml, model_path=str(folder), model_files=files)
    fleet.describe_run(facts)
    fleet.set_run_state(RunState.TRAINING)
    command = [sys.executable, "-P", "-m", "slipstream.actors", "a", f"redis.url={redis_url}", f"run.name={run_id}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "differs from the learner's: its hash is" in done.stderr, done.stderr
    assert fleet.members() == []


@pytest.mark.parametrize("load", [load_tokenizer, skeleton_of])
def test_a_folder_that_needs_its_own_code_is_refused_by_the_name_of_the_setting_and_nobody_is_asked(
    load: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = save_tiny_model(tmp_path), tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit(folder / "config.json", model_type="own", auto_map=own)
    own_tokenizer = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=own_tokenizer)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks a question"))
    with pytest.raises(ConfigError, match=r"`model.path` .* needs Python code from its folder .* never run"):
        load(folder)
    assert not ran.exists()


def test_the_code_of_a_model_that_transformers_knows_is_left_alone(tmp_path: Path) -> None:
    folder, ran = save_tiny_model(tmp_path), tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    edit(folder / "config.json", auto_map={"AutoConfig": "own.Config"})
    assert next(skeleton_of(folder).parameters()).device == torch.device("meta")
    assert not ran.exists()


def test_every_load_by_transformers_says_that_no_code_is_trusted() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for room in ("actors", "common", "envhub", "learner", "replay", "tools")
        for path in (ROOT / room).rglob("*.py")
        if "from_" in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        and not any(word.arg == "trust_remote_code" and ast.unparse(word.value) == "False" for word in call.keywords)
    ]
    assert silent == []
