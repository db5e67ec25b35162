"""Compiles and loads `fake_cuda.cpp`: a CUDA device for PyTorch's autograd, without memory and kernels."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from slipstream.common.process.config_error import ConfigError

SOURCE = Path(__file__).parent / "fake_cuda.cpp"
COMPILE_TIMEOUT_S = 120.0


def load_backend() -> ctypes.CDLL:
    """Compile the backend and load it into this process: before torch is imported, which looks for backends then.

    Call its `register_guard` after that import. Raises ConfigError.
    """
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    compiler = checked_compiler()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake_cuda.so"
        command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}", str(SOURCE)]
        command += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}", "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if done.returncode:
            raise ConfigError(f"{compiler} could not compile {SOURCE}: {done.stderr.strip()}; see the error above")
        return ctypes.CDLL(str(library))


def checked_compiler() -> str:
    """The C++ compiler: `CXX`, else g++. Raises ConfigError without one."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"a plan needs a C++ compiler, and {compiler} is not installed; install one (Debian, Ubuntu: apt-get "
            "install g++), or set the environment variable CXX to a compiler"
        )
    return compiler
