"""Lets the processes that tests start begin with their imports done: each is a fork of one that has imported them.

The imports of a tiny learner or engine are most of its start, and take 5 to 6 s of CPU. `start_by_forks` changes
`subprocess.Popen`, in this process and in those it forks, for the programs in IMAGES; any other program starts as
before. A program is still a process of its own: a child of the one that started it, with its own command line,
environment, session and files. A `sitecustomize` of a test runs after the imports, instead of before them. With
SLIPSTREAM_TEST_FORKS=0 nothing is changed.

The workers of pytest-xdist are forks too, of a process that has collected the tests: the imports and assertions of 450
test files are not read by each worker. `tests.preload_image` is the process that imports, and forks for each order.
"""

import ctypes
import fcntl
import inspect
import multiprocessing.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from slipstream.common.process.shutdown import die_with_parent

SWITCH = "SLIPSTREAM_TEST_FORKS"
TESTS = "tests"  # the image of xdist's workers
WORKER = ["-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]  # how execnet starts one
START_S = 300.0  # for the imports, on a busy machine
ROOM = 1 << 13  # bytes of command line and of environment that a program may have
FIRST_HIGH_FD = 256  # files move there until the program's own have their numbers
# What is read when a module is imported: a program that sets it to something else starts as before.
READ_BY_IMPORTS = ("CUDA", "HF_", "HOME", "LD_", "MKL_", "PYTHON", "TMPDIR", "TORCH", "TRANSFORMERS_", "VLLM_")
READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_")  # what torchrun tells its ranks: read when they join
# What torch, vLLM and TRL set when they are imported; so a process that has imported them passes it on.
SET_BY_IMPORTS = {"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "VLLM_LOGGING_LEVEL"}
_PR_SET_CHILD_SUBREAPER = 36
PYTHON = sys.executable  # a test may change it
OURS = Path(__file__).parents[1]
_LIBC = ctypes.CDLL(None, use_errno=True)
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_spawn = multiprocessing.util.spawnv_passfds


class Image(msgspec.Struct, frozen=True):
    """The programs that may be forks of one process, and what it imports beside those of ours."""

    programs: tuple[str, ...]  # what follows `python -m`
    more: tuple[str, ...]

    @property
    def imports(self) -> list[str]:
        """All modules, each once."""
        ours = [program.split()[0] for program in self.programs if program.startswith("slipstream.")]
        return list(dict.fromkeys([*self.more, *ours]))


BOUNDS, REGISTRY = "slipstream.learner.probation.bounds", "vllm.model_executor.models.registry"
OF_LEARNER = ("slipstream.learner.model.reader", "slipstream.learner.publisher.weight_server", BOUNDS)
ACTORS = ("tests.actors.scripted_actor", "tests.actors.judging_actor", "tests.actors.blocked_actor")  # without vLLM
LEAVES = {*OF_LEARNER, *ACTORS, "tests.several_ranks", REGISTRY}  # they start no program of an image
IMAGES = {  # by the package that it needs
    "torch": Image(
        programs=(
            *(f"slipstream.tools.cli.cli {verb}" for verb in ("learner", "fit", "collect", "export")),
            *(*OF_LEARNER, "slipstream.tools.run.torchrun", "tests.several_ranks", *ACTORS),
            "tests.tools.road.stand_in_road",
        ),
        more=(
            *("slipstream.tools.run.train", "slipstream.tools.run.prepare", "slipstream.tools.cli.fit_verb"),
            *("slipstream.learner.learn", "slipstream.actors.__main__", "tests.several_ranks"),
        ),
    ),
    "vllm": Image(
        programs=(
            *(f"slipstream.tools.cli.cli {verb}" for verb in ("up", "actors", "eval")),
            "slipstream.tools.cli.cli learner",  # of `up`, which is a fork of this image
            *(*OF_LEARNER, "slipstream.learner.loop", "slipstream.actors", "slipstream.actors.engine.serve_engine"),
            *("tests.actors.exchanging_engine", "tests.actors.overlapped_engine", "tests.tools.cli.script"),
            REGISTRY,  # which vLLM asks once for each class of models on a new machine
        ),
        more=(
            *("slipstream.tools.run.up", "slipstream.tools.run.actor_host", "slipstream.tools.run.train"),
            *("slipstream.tools.play.evaluate", "slipstream.learner.learn", "slipstream.actors.__main__"),
            *("vllm.v1.worker.cpu_worker", "vllm.v1.core.sched.scheduler"),
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        ),
    ),
}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A program to start. The files that come with the order get the numbers `fds`."""

    arguments: list[str]  # what follows `python -m`, or -c and the code
    environment: dict[str, str]
    folder: str
    fds: list[int]
    parent: int
    options: list[str] = []  # -u and -P, of Python
    new_session: bool = False
    follows_parent: bool = False
    is_leaf: bool = True


class Preloaded:
    """The connection to a process that has imported an image, and forks for this process."""

    def __init__(self, image: str, orders: socket.socket, environment: Mapping[str, str]) -> None:
        self._image, self._orders, self._environment = image, orders, environment
        self._one_at_a_time = threading.Lock()
        orders.settimeout(START_S)

    def imported_with(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with `environment` would import the same."""
        own, given = (python_path(each, customizes=False) for each in (self._environment, environment))
        names = read_by_imports(environment) - {"PYTHONPATH"}
        alike = all(self._environment.get(name) == environment[name] for name in names)
        return alike and not any(_shadows(folder) for folder in given if folder not in (*own, str(OURS)))

    def start(self, order: Order, files: Sequence[int]) -> int:
        """Start a program as a child of this process; return its id."""
        with self._one_at_a_time:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the program's first parent ends, and this process inherits it
            try:
                socket.send_fds(self._orders, [msgspec.msgpack.encode(order)], list(files))
                pid = self._orders.recv(32)
            finally:
                _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise RuntimeError(f"the process that has imported the image `{self._image}` has ended")
        return int(pid)


def python_path(environment: Mapping[str, str], *, customizes: bool) -> list[str]:
    """The folders of PYTHONPATH that have a sitecustomize, or the others."""
    folders = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return [folder for folder in folders if Path(folder, "sitecustomize.py").exists() is customizes]


def read_by_imports(environment: Mapping[str, str]) -> set[str]:
    """The names of variables that matter when modules are imported."""
    read = {name for name in environment if name.startswith(READ_BY_IMPORTS) and not name.startswith(READ_LATER)}
    return read - SET_BY_IMPORTS


def _shadows(folder: str) -> bool:
    """Whether a module of a folder of PYTHONPATH might be imported instead of one that an image has imported."""
    path = Path(folder)
    names = {file.stem for file in path.glob("*.py")} | {file.parent.name for file in path.glob("*/__init__.py")}
    others = [each for each in sys.path if each != folder]
    return not path.is_absolute() or any(PathFinder.find_spec(name, others) for name in names)


_preloaded: dict[str, Preloaded] = {}
_processes: dict[str, subprocess.Popen[bytes]] = {}  # kept, as one that is forgotten while it runs is warned of
_is_fork = False
_environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # now, before a test changes it


def start_by_forks() -> None:
    """Start the programs of IMAGES by forks from now on, in this process (Linux only)."""
    if os.environ.get(SWITCH) != "0" and sys.platform == "linux":
        subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]
        multiprocessing.util.spawnv_passfds = _fork_or_spawn


def start_workers_by_forks(pytest_arguments: Sequence[str]) -> None:
    """Start xdist's workers by forks of a process that collects the same tests."""
    if subprocess.Popen._execute_child is _fork_or_execute:  # type: ignore[attr-defined]
        _start_image(TESTS, pytest_arguments)


def be_fork(image: str, preloaded: Preloaded | None) -> None:
    """In a fork of an image: programs are started by `preloaded`, which has imported the same."""
    global _is_fork
    _is_fork = image != TESTS  # a worker starts images of its own
    if preloaded:
        _preloaded[image] = preloaded


def _fork_or_execute(*arguments: Any) -> None:
    """`Popen._execute_child`, with the same arguments."""
    asked = SimpleNamespace(**inspect.signature(_execute).bind(*arguments).arguments)
    environment = dict(os.environ if asked.env is None else asked.env)
    follows_parent = isinstance(asked.preexec_fn, partial) and asked.preexec_fn.func is die_with_parent
    name = _image_of(asked.args)
    preloaded = _start_image(name) if name and (asked.preexec_fn is None or follows_parent) else None
    if preloaded is None or not preloaded.imported_with(environment):
        _execute(*arguments)
        return
    command = _after_m(asked.args) or list(asked.args[2:])
    order = Order(
        arguments=command,
        environment=environment,
        folder=str(asked.cwd or Path.cwd()),
        fds=[0, 1, 2, *asked.pass_fds],
        parent=os.getpid(),
        options=[word for word in asked.args[1:3] if word in ("-u", "-P")],
        new_session=asked.start_new_session,
        follows_parent=follows_parent,
        is_leaf=name == TESTS or command[0] in LEAVES,
    )
    streams = enumerate((asked.p2cread, asked.c2pwrite, asked.errwrite))
    files = [own if given == -1 else given for own, given in streams]
    asked.self.pid = preloaded.start(order, [*files, *asked.pass_fds])
    asked.self._child_created = True
    asked.self._close_pipe_fds(
        asked.p2cread, asked.p2cwrite, asked.c2pread, asked.c2pwrite, asked.errread, asked.errwrite
    )


def _fork_or_spawn(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """`multiprocessing.util.spawnv_passfds`, with the same arguments: vLLM's workers are forks of their engine's image.

    What vLLM has set in the environment since it was imported, it reads later.
    """
    words = [os.fsdecode(word) for word in args]
    preloaded = next(iter(_preloaded.values()), None) if _is_fork and words[-1] == "--multiprocessing-fork" else None
    if preloaded is None:
        return _spawn(path, args, passfds)
    files, code, folder = [0, 1, 2, *sorted(passfds)], words[words.index("-c") :], str(Path.cwd())
    order = Order(arguments=code, environment=dict(os.environ), folder=folder, fds=files, parent=os.getpid())
    return preloaded.start(order, files)


def _after_m(command: Any) -> list[str]:
    """What follows `python -m`, which may have -u and -P before it; empty for another command."""
    words = [str(word) for word in command] if isinstance(command, list | tuple) else []
    for option in ("-u", "-P"):
        if words[:2] == [PYTHON, option]:
            del words[1]
    return words[2:] if words[:2] == [PYTHON, "-m"] else []


def _image_of(command: Any) -> str | None:
    """The name of an image with the command's program, if there is one: in a fork, of its own image."""
    words = _after_m(command)
    if TESTS in _preloaded and list(command[1:]) == WORKER:
        return TESTS
    if not words:
        return None
    module, verb = words[0], " ".join(words[:2])
    names = [name for name, image in IMAGES.items() if {module, verb} & set(image.programs) and find_spec(name)]
    return next((name for name in names if name in _preloaded), names[0] if names else None)


def _start_image(name: str, arguments: Sequence[str] = ()) -> Preloaded | None:
    """The connection to the process of an image, which it starts; None in a fork of another image."""
    if name not in _preloaded and not _is_fork:
        environment = _environment
        if name == "vllm":
            from slipstream.actors.engine.vllm_environment import vllm_environment  # it imports torch

            environment = environment | vllm_environment()
        ours, theirs = pair()
        with theirs:  # the process ends when `ours` is closed
            _processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.preload_image", name, str(theirs.fileno()), " " * ROOM, *arguments],
                stdout=subprocess.DEVNULL if name == TESTS else None,  # the list of tests
                pass_fds=[theirs.fileno()],
                env={**environment, "ROOM": " " * ROOM},
                cwd=OURS,
                start_new_session=True,
            )
        _preloaded[name] = Preloaded(name, ours, environment)
    return _preloaded.get(name)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return high(one), high(other)


def high(connection: socket.socket) -> socket.socket:
    """The same with a number that no program asks for."""
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, FIRST_HIGH_FD))
