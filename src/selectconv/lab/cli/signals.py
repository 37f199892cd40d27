"""Ctrl-C and SIGTERM: while a command works they raise, so that it can clean up after itself.

An exception in the middle of an import is sometimes swallowed by it, and leaves half a module:
there, the process ends at once. A training's folder then says "running", and can be resumed.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from selectconv.errors import RunError

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def answered_by(
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers,
) -> Iterator[None]:
    """Let a handler, such as `stop`, answer both while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = {number: signal.signal(number, handler) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def ignore() -> None:
    """Let neither cut off what the process still has to say, until `answered_by` ends."""
    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_IGN)


def stop(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt on Ctrl-C, and RunError on SIGTERM."""
    words, code = "interrupted; trainings continue with --resume.", 130
    if number == signal.SIGTERM:
        words, code = "stopped by SIGTERM; trainings continue with --resume.", 1
        if "TORCHELASTIC_RUN_ID" in os.environ:
            words += " torchrun sends it when another process of the run has died."
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, f"selectconv: {words}\n".encode())
            os._exit(code)
        frame = frame.f_back
    raise KeyboardInterrupt if code == 130 else RunError(words)


def launch(config: Any) -> Any:
    """Set up a run's devices and processes: `build_fabric`, which may wait for the others.

    torch waits in C++, half an hour if another process has died, and handlers written in Python are
    not called there: Ctrl-C and SIGTERM end the process at once.
    """
    from selectconv.lab.train.device import build_fabric

    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    with nullcontext() if is_alone else answered_by(signal.SIG_DFL):
        return build_fabric(config)
