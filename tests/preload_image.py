"""The process that has imported an image of `tests.preload`, and forks for each order: `python -m tests.preload_image`.

A fork runs its program. Before that, unless the program is a leaf, it forks once more: that process waits for the
orders of the program, whose children must be forks of a child of its own.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from slipstream.common.process.shutdown import die_with_parent
from tests import preload
from tests.preload import FIRST_HIGH_FD, IMAGES, TESTS, Order, Preloaded, high, pair, python_path, read_by_imports

MAX_ORDER_BYTES, MAX_FDS = 1 << 17, 64


def main(image: str, orders: socket.socket, pytest_arguments: Sequence[str]) -> None:
    """Import the image, and fork for each order until the other end is closed; in a fork, run the program."""
    orders = high(orders)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment = dict(os.environ)
    if image == TESTS:
        _collect(pytest_arguments)
    else:
        for module in IMAGES[image].imports:
            importlib.import_module(module)
    if new := read_by_imports(os.environ) - environment.keys():
        raise RuntimeError(f"the imports have set {sorted(new)}; add what they set to SET_BY_IMPORTS")
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not write to every page
    preloaded = None
    while True:
        order, files = _await_order(orders)
        if order.is_leaf:
            break
        ours, theirs = pair()
        if os.fork():
            preloaded = Preloaded(image, ours, environment)
            theirs.close()
            break
        # This process forks for what the program starts, now that the program has no threads yet.
        ours.close()
        orders.close()
        _close(files)
        os.setsid()
        orders = theirs
    preload.be_fork(image, preloaded)
    _run(order, files, orders)


def _collect(arguments: Sequence[str]) -> None:
    """Collect the tests in this process, without threads: it forks afterwards."""
    import pytest
    from tqdm import tqdm

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tqdm.monitor_interval = 0
    pytest.main([*arguments, "--collect-only", "-n", "0"])


def _await_order(orders: socket.socket) -> tuple[Order, list[int]]:
    """Fork for each order, and return it in the new process. Ends this process when the other end is closed."""
    while True:
        message, files, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, MAX_FDS)
        if not message:
            os._exit(0)
        if not (between := os.fork()):
            between = os.getpid()
            if os.fork():
                os._exit(0)  # now the new process is a child of the one that sent the order
            while os.getppid() == between:
                time.sleep(0.001)
            return msgspec.msgpack.decode(message, type=Order), files
        os.waitpid(between, 0)
        _close(files)


def _run(order: Order, files: list[int], orders: socket.socket) -> None:
    """Run the program in this process, and tell who ordered it that it runs."""
    import torch  # every image has imported it; who orders need not

    if order.new_session:
        os.setsid()
    os.chdir(order.folder)
    _give_numbers(files, order.fds)
    os.environ.clear()
    os.environ.update(order.environment)
    torch.set_num_threads(int(order.environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))  # as torch does itself
    is_code = order.arguments[0] == "-c"
    options = order.options if is_code else [*order.options, "-m"]
    sys.argv, sys.orig_argv = order.arguments, [sys.executable, *options, *order.arguments]
    _show(sys.orig_argv, order.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.follows_parent:
        die_with_parent(order.parent)
    orders.send(str(os.getpid()).encode())
    orders.close()
    preload.start_by_forks()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # that the program is imported already
    if "-u" in order.options:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    customizing, others = (python_path(order.environment, customizes=each) for each in (True, False))
    more = [folder for folder in others if folder not in sys.path[1:]]
    sys.path[:1] = [*([] if "-P" in order.options else [order.folder]), *customizing, *more]
    for folder in customizing:
        exec(Path(folder, "sitecustomize.py").read_text(), {})
    try:
        if is_code:
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        else:
            runpy.run_module(order.arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)
    _end(0)


def _end(code: int) -> None:
    """End as Python does, but free nothing: for all that an image has imported it would take 0.3 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # what Python says of it
    os._exit(code)


def _give_numbers(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Move each file to its number."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_HIGH_FD) for file in files]
    _close(files)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
    _close(moved)


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make /proc show this command line and environment, where those of the imported process were."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end, environment_start, environment_end = map(int, fields[45:49])  # 48 to 51 in proc(5)
    for words, first, last in (
        (command, start, end),
        ([f"{name}={value}" for name, value in environment.items()], environment_start, environment_end),
    ):
        shown = "".join(f"{word}\0" for word in words).encode()[: last - first - 1]
        ctypes.memmove(first, shown.ljust(last - first, b"\0"), last - first)


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), sys.argv[4:])
