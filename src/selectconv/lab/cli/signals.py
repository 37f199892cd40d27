"""Ctrl-C and SIGTERM while the command starts: one line, and the process ends at once.

An exception in the middle of an import is sometimes swallowed by it, and leaves half a module.
Nothing but the standard library is imported here, so that this comes first.
"""

import os
import signal
import threading

# The words and the exit code; a training that SIGTERM stops has failed, too.
_ENDS = {signal.SIGINT: ("interrupted.", 130), signal.SIGTERM: ("stopped by SIGTERM.", 1)}


def leave_at_once() -> None:
    """Let both signals end the process with a line, until a verb's work begins."""
    if threading.current_thread() is threading.main_thread():
        for number in _ENDS:
            signal.signal(number, _leave)


def work_begins() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: what was imported can clean up after itself.

    Nothing is changed where the command was called from Python.
    """
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    words, code = _ENDS[signal.Signals(number)]
    os.write(2, f"selectconv: {words}\n".encode())
    os._exit(code)
