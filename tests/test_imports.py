"""What each room needs in order to be imported: an environment server or a dashboard must not wait for torch."""

import subprocess
import sys
from pathlib import Path

from envhub.catalogue import ADAPTERS, ASSETS, DRIVING, ENVS, REMOTE

REPOSITORY = Path(__file__).parents[1]

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
    paths = sorted((REPOSITORY / room).rglob("*.py"))
    return [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in paths if path.stem != "__init__"]


def test_common_replay_and_envhub_import_without_torch() -> None:
    modules = modules_of("common") + modules_of("replay") + modules_of("envhub")
    modules.remove("envhub.adapters.verifiers_driver")  # a program for another Python, with that package, without ours
    assert len(modules) > 130
    import_without("torch,vllm,transformers", modules)


def test_verbs_that_only_look_or_supervise_import_without_torch() -> None:
    verbs = [f"tools.{name}" for name in ("cli", "up", "actor_host", "top", "replay.audit", "doctor", "train")]
    questions = [f"tools.replay.{name}" for name in ("questions", "groups", "edit", "failures")]
    import_without("torch,vllm,transformers", verbs + questions)


def test_the_learner_imports_without_vllm_and_the_actors_too_but_for_their_engine_process() -> None:
    learner = [name for name in modules_of("learner") if name != "learner.publisher.serve"]
    actors = [name for name in modules_of("actors") if name not in ENGINE_FILES]
    import_without("vllm", [*learner, *actors])


ENGINE_FILES = tuple(
    f"actors.{name}"
    for name in ("vllm_start", "staged_transfer", "reload", "kept_twin", "serve_engine", "answer_parser")
)


def test_no_environment_is_imported_before_it_is_played() -> None:
    places = (ENVS | ADAPTERS | ASSETS | REMOTE | DRIVING).values()
    modules = {place.partition(":")[0] for place in places} - {"envhub.remote.env_client"}  # rollouts ask for its class
    import_without(",".join(modules), ["tools.cli", "tools.top", "actors.act", "learner.learn"])
