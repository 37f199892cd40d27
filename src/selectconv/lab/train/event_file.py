"""A run's metrics for TensorBoard.

torch's SummaryWriter writes in a thread of its own, which prints a traceback when the disk is full.
Here a line of metrics is written at once, and what fails is an error of ours.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from selectconv.errors import RunError


class EventFile:
    """A file of scalars in TensorBoard's format, written as a training goes on.

    Args:
        folder: where it is made; TensorBoard reads all such files of a folder as one.
        first_epoch: where this training begins; what older files say of later epochs is void.

    Raises:
        RunError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     events = EventFile(Path(folder), first_epoch=0)
        ...     events.add({"test_error": 31.5, "test_loss": None}, epoch=0)
        ...     print(events.path.exists())
        True
    """

    def __init__(self, folder: Path, first_epoch: int) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        start = SessionLog(status=SessionLog.START)
        self._write(Event(file_version="brain.Event:2"), Event(step=first_epoch, session_log=start))

    def add(self, row: Mapping[str, float | None], epoch: int) -> None:
        """Write the values of an epoch; None is left out.

        Raises:
            RunError: it cannot be written.
        """
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if value is not None
        ]
        self._write(Event(step=epoch, summary=Summary(value=values)))

    def _write(self, *events: Event) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                for event in events:
                    event.wall_time = time.time()
                    RecordWriter(file).write(event.SerializeToString())
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror or error}.") from error
