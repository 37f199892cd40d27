"""Ctrl-C and SIGTERM: while a command works they raise, so that it can clean up after itself.

An exception in the middle of an import is sometimes swallowed by it, and leaves half a module:
there, the process ends at once.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from selectconv.errors import RunError

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C, and RunError on SIGTERM, while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = {number: signal.signal(number, _raise) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Let neither cut off what the process still has to say, until `raised` ends."""
    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_IGN)


def _raise(number: int, frame: FrameType | None) -> None:
    words, code = "interrupted.", 130
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
