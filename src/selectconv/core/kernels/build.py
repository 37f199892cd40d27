"""Compile the C kernel once per machine, in about a second with any C compiler, and load it.

The source is plain C without torch's headers, so it compiles fast, and the wheel stays pure Python.
The library goes into the user's cache, named after the source and the instruction set.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from selectconv.files import cache_folder, replacing

_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 600  # a compiler that hangs; on a busy machine a second may take minutes
# The functions of select.c, and how many pointers each takes.
_FUNCTIONS = {"channel_moments": 4, "select_forward": 5, "select_backward": 9, "norm_backward": 7}
# Each must be a set of instructions for which torch itself has kernels.
_INSTRUCTIONS = {"AVX512": ["-march=x86-64-v4"], "AVX2": ["-march=x86-64-v3"]}


@dataclass(frozen=True)
class Build:
    """The loaded library, or why it is missing.

    Attributes:
        library: the functions of select.c; None: they are not available here.
        about: one line for people: how it was built, or the reason.
    """

    library: ctypes.CDLL | None
    about: str


@functools.cache
def load_kernel() -> Build:
    """Load the C kernel, compiling it first where this machine has not done so yet."""
    names = (os.environ.get("CC") or _COMPILERS[0], *_COMPILERS)
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    capability = torch.backends.cpu.get_cpu_capability()
    source = resources.files("selectconv.core.kernels").joinpath("select.c").read_bytes()
    # No float operation traps: without this the compiler may not vectorise a comparison.
    flags = ["-O3", "-std=c11", "-fPIC", "-fno-trapping-math", "-fno-math-errno"]
    if platform.machine().lower() in ("x86_64", "amd64"):
        flags += _INSTRUCTIONS.get(capability, [])
    if platform.system() == "Windows":  # select.c is built as a POSIX shared library
        return Build(None, "no C kernel for Windows")
    # Threads come from the OpenMP that torch has loaded: a second one would fight for cores.
    for threads in (["-fopenmp"], ["-fopenmp-simd"], []):
        key = hashlib.sha256(b"\0".join([source, *(flag.encode() for flag in flags + threads)]))
        name = f"select-{platform.system()}-{platform.machine()}-{key.hexdigest()[:16]}.so".lower()
        how = f"C kernel, {capability}, {'threads' if '-fopenmp' in threads else 'one thread'}"
        try:
            with _cache_folder() as folder:  # a loaded library needs its file no more
                path = folder / name
                if not path.exists():
                    if compiler is None:
                        return Build(None, f"no C compiler ({', '.join(_COMPILERS)}) found")
                    _compile(compiler, source, flags + threads, path)
                library = ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError) as error:
            failure = str(error).splitlines()[0]
            continue
        for function, arguments in _FUNCTIONS.items():
            getattr(library, function).argtypes = [ctypes.c_void_p] * arguments
        return Build(library, how)
    return Build(None, f"the C kernel cannot be built or loaded: {failure}")


@contextmanager
def _cache_folder() -> Iterator[Path]:
    """Open the folder of built kernels; one for the moment if the cache cannot be written."""
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        can_write = os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        can_write = False
    with tempfile.TemporaryDirectory(prefix="selectconv-") as temporary:
        yield folder if can_write else Path(temporary)


def _compile(compiler: str, source: bytes, flags: list[str], path: Path) -> None:
    # Other processes may build it too.
    with tempfile.TemporaryDirectory() as folder, replacing(path, shared=True) as library:
        code, unit = (str(Path(folder) / name) for name in ("s.c", "s.o"))
        Path(code).write_bytes(source)
        # Linked without OpenMP: its functions are found in the library that torch has loaded.
        for arguments in (
            [*flags, "-c", code, "-o", unit],
            ["-shared", unit, "-o", library, "-lm"],
        ):
            done = subprocess.run(
                [compiler, *arguments],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_TIMEOUT_S,
            )
            if done.returncode != 0:
                said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
                raise OSError(f"{Path(compiler).name}: {said}")
