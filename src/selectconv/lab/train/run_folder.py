"""A run's folder: its files, each of which appears whole or not at all."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from selectconv import __version__
from selectconv.errors import RunError, UsageError
from selectconv.files import read_json_lines, write_text
from selectconv.lab.train.digests import (
    DIGESTS,
    append_recorded,
    check_recorded,
    settle,
    write_recorded,
)
from selectconv.lab.train.folder_lock import HOLDER, LOCK

CONFIG, ENVIRONMENT, STATUS = "config.yaml", "env.json", "status.json"
STATUSES = ("running", "done", "failed", "interrupted")
METRICS, ALLOCATION = "metrics.jsonl", "allocation.jsonl"
CHECKPOINT, PREVIOUS = "last.ckpt", "previous.ckpt"
LAST, BEST = "last.safetensors", "best.safetensors"
HOLDOUT, IMAGES, TENSORBOARD = "holdout.json", "images.json", "tensorboard"
OWN: tuple[str, ...] = (
    CONFIG, ENVIRONMENT, STATUS, METRICS, ALLOCATION, CHECKPOINT, PREVIOUS, LAST, BEST, HOLDOUT,
    IMAGES, DIGESTS, TENSORBOARD,
)  # fmt: skip
# What `compress`, `export` and `report` make of a run, in its folder.
COMPRESSED, ONNX, REPORT = "compressed.safetensors", "model.onnx", "report.html"
_LOCK_FILES = (LOCK, HOLDER, f"{HOLDER}.part")
# What a start that was cut short, before it wrote its settings, may leave behind.
_BEGINNINGS = (DIGESTS, f"{DIGESTS}.part", f"{CONFIG}.part")


class RunFolder:
    """The folder of a run, as in the README's list of files.

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def is_empty(self) -> bool:
        """Return whether nothing would be lost by starting a run here."""
        if not self.path.is_dir():
            return not self.path.exists()
        return all(entry.name in _BEGINNINGS for entry in self._entries())

    def _entries(self) -> list[Path]:
        return sorted(entry for entry in self.path.iterdir() if entry.name not in _LOCK_FILES)

    def check_own(self) -> None:
        """Refuse a folder that holds anything but a run's own files and what was made of it.

        Raises:
            UsageError: there are files that no run wrote.
        """
        names = [entry.name for entry in self._entries()]
        own = OWN
        if CONFIG in names:  # elsewhere, a model.onnx is somebody else's
            own += (COMPRESSED, ONNX, REPORT)
        foreign = [name for name in names if name.removesuffix(".part") not in own]
        if foreign:
            raise UsageError(
                f"{self.path} holds {foreign[0]!r}, which no run wrote: nothing was deleted; "
                "choose another --out."
            )

    def clear(self) -> None:
        """Delete a run's own files; refuse a folder that holds anything else.

        Raises:
            UsageError: there are files that no run wrote.
        """
        self.check_own()
        # The settings last: until then it is a run, and a second try deletes the rest.
        for entry in sorted(self._entries(), key=lambda entry: entry.name == CONFIG):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def start(self, config: Mapping[str, Any]) -> None:
        """Create the folder with its settings and the environment."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create {self.path}: {error.strerror}.") from error
        text = yaml.safe_dump(dict(config), sort_keys=False)
        write_recorded(self / CONFIG, lambda file: file.write(text.encode()))
        self.set_status("running")  # before the environment, which takes a moment to collect
        environment = json.dumps(describe_environment(), indent=2) + "\n"
        write_recorded(self / ENVIRONMENT, lambda file: file.write(environment.encode()))

    def read_config(self) -> dict[str, Any]:
        """Read the settings of the run.

        Raises:
            RunError: they are missing, or cannot be read.
        """
        path = self / CONFIG
        if path.exists():
            check_recorded(
                path, "restore it, or start another run with the settings that you want."
            )
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            lack = f"it has no {CONFIG}" if self.path.is_dir() else "there is no such folder"
            lack = "it is a file" if self.path.is_file() else lack
            raise RunError(f"{self.path} is not a run: {lack}.") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RunError(f"{path} cannot be read: {str(error).splitlines()[0]}.") from error
        if not isinstance(config, dict):
            raise RunError(f"{path} must hold settings, one per line.")
        return config

    def status(self) -> str:
        """Return the status, one of `STATUSES`; without a file it is `running`.

        Raises:
            RunError: the file is damaged.
        """
        path = self / STATUS
        try:
            status = json.loads(path.read_bytes())["status"]
        except OSError:
            return STATUSES[0]
        except (ValueError, KeyError, TypeError):
            status = None
        if status not in STATUSES:
            raise RunError(f"{path} is damaged; delete it, and go on with --resume.")
        return str(status)

    def is_finished(self, epochs: int) -> bool:
        """Return whether the run is done; what its status says must agree with its metrics.

        Raises:
            RunError: the metrics were damaged or changed.
        """
        return self.status() == "done" and len(self.read(METRICS)) == epochs

    def set_status(self, status: str, message: str | None = None) -> None:
        """Write the status, with a message for a failed run."""
        content = {"status": status} if message is None else {"status": status, "message": message}
        write_text(self / STATUS, json.dumps(content) + "\n")

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a line to a jsonl file.

        Raises:
            RunError: it could not be written; the file ends where it ended before.
        """
        append_recorded(self / name, (dumps(row) + "\n").encode())

    def read(self, name: str) -> list[dict[str, Any]]:
        """Read a jsonl file; an unfinished last line, left by a killed process, is ignored.

        Raises:
            RunError: it was damaged or changed, or a line is not JSON.
        """
        path = self.check(name)
        rows: list[dict[str, Any]] = read_json_lines(path) if path.exists() else []
        return rows

    def check(self, name: str) -> Path:
        """Return the path of a file, which need not exist.

        Raises:
            RunError: it was damaged or changed.
        """
        path = self / name
        check_recorded(path, "restore it, or train again.")
        return path

    def settle(self) -> None:
        """Note that the lines so far belong to the checkpoint: none of them may be missing."""
        for name in (METRICS, ALLOCATION):
            settle(self / name)

    def cut_after(self, epoch: int) -> None:
        """Drop the lines of epochs after the checkpoint's: those epochs will be run again."""
        for name in (METRICS, ALLOCATION):
            kept = [dumps(row) + "\n" for row in self.read(name) if row["epoch"] <= epoch]
            if (self / name).exists():
                write_recorded(self / name, partial(_write_lines, kept))


def _write_lines(lines: list[str], file: BinaryIO) -> None:
    file.write("".join(lines).encode())


def dumps(row: Mapping[str, Any]) -> str:
    """Return a row as one line of JSON; floats keep all their digits."""
    return json.dumps(row, separators=(", ", ": "), allow_nan=False)


def describe_environment() -> dict[str, Any]:
    """Collect what results depend on besides the settings: commit, versions, hardware."""
    import torch  # takes seconds, and reading a folder does not need it

    # Installed in somebody's repository, that repository would answer.
    is_ours = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    packages = ("torch", "numpy", "lightning-fabric")
    hardware = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        hardware = ", ".join(
            torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
        )
    return {
        "commit": _git("rev-parse", "HEAD") if is_ours else None,
        "dirty": is_ours and bool(_git("status", "--porcelain")),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {"selectconv": __version__} | {name: version(name) for name in packages},
        "hardware": hardware,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _git(*arguments: str) -> str | None:
    """Ask git about the package's own source tree; None where it is installed without one."""
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
