"""What each room needs in order to be imported: an environment server or a dashboard must not wait for torch."""

from collections.abc import Iterable
from pathlib import Path

import slipstream
from slipstream.envhub.catalogue import ADAPTERS, ASSETS, DRIVING, ENVS, REMOTE
from slipstream.envhub.rewards.part import ASKING
from tests.processes import REPOSITORY, python

SOURCES = REPOSITORY / "src"
TORCH = ("torch", "vllm", "transformers")
PLAYED = ENVS | ADAPTERS | ASSETS | REMOTE | DRIVING

IMPORT_WITHOUT = """
import importlib, sys

refused = []

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{root}.") for root in refused):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
for refused_now, modules in zip(sys.argv[1::2], sys.argv[2::2]):
    refused[:] = refused_now.split()
    for name in modules.split():
        importlib.import_module(name)
"""


def import_without(*stages: tuple[Iterable[str], Iterable[str]]) -> None:
    """Import modules in a new process in which importing any of those refused is an error: (refused, modules)."""
    done = python("-c", IMPORT_WITHOUT, *(" ".join(names) for stage in stages for names in stage))
    assert done.returncode == 0, done.stderr


def modules_of(room: str) -> list[str]:
    paths = sorted((SOURCES / "slipstream" / room).rglob("*.py"))
    return [".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in paths if path.stem != "__init__"]


def test_common_replay_and_envhub_import_without_torch() -> None:
    modules = modules_of("common") + modules_of("replay") + modules_of("envhub")
    # a program for another Python, with that package, without ours
    modules.remove("slipstream.envhub.adapters.verifiers_driver")
    assert len(modules) > 130
    import_without((TORCH, modules))


def test_the_public_names_are_there_and_cost_nothing_until_they_are_used() -> None:
    import_without(([*TORCH, "msgspec", "omegaconf"], ["slipstream"]))
    public = [name for name in slipstream.__all__ if getattr(slipstream, name) is None]
    assert public == [] and set(slipstream.__all__) <= set(dir(slipstream))


def test_no_room_is_a_package_of_its_own_where_slipstream_is_installed(tmp_path: Path) -> None:
    """A `tools.py` or a `common/` of the user's must not meet ours."""
    program = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    rooms = ["learner", "actors", "replay", "envhub", "common", "tools", "conf", "slipstream"]
    assert python("-c", program, *rooms, cwd=tmp_path).stdout == "['slipstream']\n"


def test_verbs_that_only_look_or_supervise_import_without_torch() -> None:
    verbs = ["cli.cli", "run.up", "run.actor_host", "see.top", "run.doctor", "run.train"]
    verbs += ["replay.groups", "replay.group_edits", "replay.failure_table"]
    import_without((TORCH, [f"slipstream.tools.{name}" for name in verbs]))


def test_before_a_run_has_them_no_judge_environment_or_vllm_is_imported() -> None:
    """No judge by the learner, no environment by any, and vLLM by the actors' engine process alone.

    All in one process, as most of its time is the import of torch.
    """
    judges, worlds = ({place.partition(":")[0] for place in places.values()} for places in (ASKING, PLAYED))
    begun = [f"slipstream.{name}" for name in ("tools.cli.cli", "tools.see.top", "actors.host.act")]
    apart = ["slipstream.learner.publisher.weight_server", "slipstream.learner.loop"]  # the latter samples itself
    of_engine = ("vllm_start", "staged_transfer", "reload", "kept_shadow", "serve_engine", "vllm_parsers")
    apart += [f"slipstream.actors.engine.{name}" for name in of_engine]
    every = [name for name in modules_of("learner") + modules_of("actors") if name not in apart]
    of_learner = (["vllm", *worlds, *judges], ["slipstream.learner.learn"])
    import_without(of_learner, (["vllm", *worlds], begun), (["vllm"], every))
