"""A disk that is full at random moments: one line says so, nothing is lost, the run goes on later.

The disk is a small tmpfs in a mount namespace of the worker's own, which the system removes with
the worker; this takes Linux, and root or user namespaces.
"""

import ctypes
import os
import random
import subprocess
from functools import cache
from pathlib import Path

from soak.commands import RUN, Child, Finished, check_words, differences, run, undisturbed
from soak.driver import DIFFERENT, LOST, Ended, Wrong
from soak.kills import duration, pass_time

TITLE = "a full disk (tmpfs) at random moments, then space again and `--resume`"
WANTED = "one line, exit code 1, and the last bit of an undisturbed run after `--resume`"
COUNT, LIMIT_S = 60, 3600
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # of sched.h
ENOUGH = "64m"


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Fill a disk under a command."""
    enter_own_mounts()
    disk = scratch / "disk"
    disk.mkdir()
    try:
        return draw.choices((small_disk, filled_disk, no_space_for_output), (3, 3, 2))[0](
            draw, disk
        )
    finally:
        subprocess.run(["umount", "--lazy", disk], check=False)


def small_disk(draw: random.Random, disk: Path) -> Ended:
    """Train on a disk that is too small, somewhere between a page and a whole run."""
    what, size = "train on a small disk", draw.randrange(4096, footprint())
    mount(disk, str(size))
    return resume(what, Child([*RUN, "--out", str(disk / "run")]).wait(), disk)


def filled_disk(draw: random.Random, disk: Path) -> Ended:
    """Let something else fill the disk while a run is under way."""
    what = "disk filled during training"
    mount(disk, str(2 * footprint()))
    child = Child([*RUN, "--out", str(disk / "run")])
    pass_time(child, draw.random() * duration())
    fill(disk / "filler")
    ended = child.wait()
    (disk / "filler").unlink()
    return resume(what, ended, disk)


def resume(what: str, ended: Finished, disk: Path) -> Ended:
    """Make space and go on with a run that met a full disk; compare its end."""
    out = disk / "run"
    line = ""
    if ended.code:
        line = check_words(what, ended, codes=(1,))
        if "No space left" not in line:
            raise Wrong(what, LOST, line)
        mount(disk, ENOUGH, again=True)
        ended = run(*RUN, *(["--resume"] if out.exists() else []), "--out", out)
        if ended.code:
            raise Wrong(what, LOST, f"{line} Then, with space: {ended.err[-300:]}")
    if differing := differences(out, undisturbed()):
        raise Wrong(what, DIFFERENT, f"{', '.join(differing)}; {line}")
    return Ended(what, "said so, resumed" if line else "had space", line)


def no_space_for_output(draw: random.Random, disk: Path) -> Ended:
    """Write a model where there is no space for it."""
    verb = draw.choice(("compress", "export", "report"))
    what, out = f"{verb} on a full disk", disk / "file"
    mount(disk, "64k")
    fill(disk / "filler")
    ended = run(verb, undisturbed(), "--out", out)
    if not ended.code:
        raise Wrong(what, DIFFERENT, "exit 0")
    line = check_words(what, ended, codes=(1,))
    if left := [path.name for path in disk.iterdir() if path.name != "filler"]:
        raise Wrong(what, DIFFERENT, f"left behind: {left}; {line}")
    return Ended(what, "said so", line)


def mount(disk: Path, size: str, *, again: bool = False) -> None:
    """Mount a tmpfs of a size, or give it another size."""
    options = f"remount,size={size}" if again else f"size={size}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "soak", disk], check=True)


def fill(path: Path) -> None:
    """Write until there is no space left."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (65536, 1):
            try:
                while True:
                    os.write(handle, bytes(size))
            except OSError:
                continue
    finally:
        os.close(handle)


@cache
def footprint() -> int:
    """Return the bytes of a finished run."""
    return sum(path.stat().st_size for path in undisturbed().rglob("*") if path.is_file())


@cache
def enter_own_mounts() -> None:
    """Give this process mounts of its own, which nobody else sees."""
    libc, user = ctypes.CDLL(None, use_errno=True), os.getuid()
    if libc.unshare(_NEW_MOUNTS | (0 if user == 0 else _NEW_USER)):
        raise OSError(ctypes.get_errno(), "no mounts of one's own: needs root or user namespaces")
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
