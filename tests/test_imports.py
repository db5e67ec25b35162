"""What each room needs in order to be imported: an environment server or a dashboard must not wait for torch."""

import subprocess
import sys
from pathlib import Path

import slipstream
from slipstream.envhub.catalogue import ADAPTERS, ASSETS, DRIVING, ENVS, REMOTE
from slipstream.envhub.rewards.part import ASKING

REPOSITORY = Path(__file__).parents[1]
SOURCES = REPOSITORY / "src"

IMPORT_WITHOUT = """
import importlib, sys

refused = sys.argv[1].split(",")

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{root}.") for root in refused):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def import_without(refused: str, modules: list[str]) -> None:
    """Import `modules` in a new process in which importing any of `refused` is an error."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, refused, *modules],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def modules_of(room: str) -> list[str]:
    paths = sorted((SOURCES / "slipstream" / room).rglob("*.py"))
    return [".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in paths if path.stem != "__init__"]


def test_common_replay_and_envhub_import_without_torch() -> None:
    modules = modules_of("common") + modules_of("replay") + modules_of("envhub")
    # a program for another Python, with that package, without ours
    modules.remove("slipstream.envhub.adapters.verifiers_driver")
    assert len(modules) > 130
    import_without("torch,vllm,transformers", modules)


def test_the_public_names_are_there_and_cost_nothing_until_they_are_used() -> None:
    import_without("torch,vllm,transformers,msgspec,omegaconf", ["slipstream"])
    public = [name for name in slipstream.__all__ if getattr(slipstream, name) is None]
    assert public == [] and set(slipstream.__all__) <= set(dir(slipstream))


def test_no_room_is_a_package_of_its_own_where_slipstream_is_installed(tmp_path: Path) -> None:
    """A `tools.py` or a `common/` of the user's must not meet ours."""
    program = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    rooms = ["learner", "actors", "replay", "envhub", "common", "tools", "conf", "slipstream"]
    command = [sys.executable, "-c", program, *rooms]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "['slipstream']\n"


def test_verbs_that_only_look_or_supervise_import_without_torch() -> None:
    verbs = [
        "slipstream.tools.cli.cli",
        "slipstream.tools.run.up",
        "slipstream.tools.run.actor_host",
        "slipstream.tools.see.top",
        "slipstream.tools.run.doctor",
        "slipstream.tools.run.train",
    ]
    questions = [
        "slipstream.tools.replay.groups",
        "slipstream.tools.replay.group_edits",
        "slipstream.tools.replay.failure_table",
    ]
    import_without("torch,vllm,transformers", [*verbs, *questions])


def test_the_learner_imports_without_vllm_and_the_actors_too_but_for_their_engine_process() -> None:
    apart = (
        "slipstream.learner.publisher.weight_server",
        "slipstream.learner.loop",
    )  # the latter samples in its own process
    learner = [name for name in modules_of("learner") if name not in apart]
    actors = [name for name in modules_of("actors") if name not in ENGINE_FILES]
    import_without("vllm", [*learner, *actors])


ENGINE_FILES = (
    "slipstream.actors.engine.vllm_start",
    "slipstream.actors.engine.staged_transfer",
    "slipstream.actors.engine.reload",
    "slipstream.actors.engine.kept_shadow",
    "slipstream.actors.engine.serve_engine",
    "slipstream.actors.engine.vllm_parsers",
)


def test_no_environment_is_imported_before_it_is_played() -> None:
    places = (ENVS | ADAPTERS | ASSETS | REMOTE | DRIVING).values()
    import_without(
        ",".join({place.partition(":")[0] for place in places}),
        [
            "slipstream.tools.cli.cli",
            "slipstream.tools.see.top",
            "slipstream.actors.host.act",
            "slipstream.learner.learn",
        ],
    )


def test_the_learner_imports_no_judge_before_a_run_has_one() -> None:
    modules = {place.partition(":")[0] for place in ASKING.values()}
    import_without(",".join(modules), ["slipstream.learner.learn"])
