"""A run's folder: its files, each of which appears whole or not at all.

Under torchrun every process holds the folder; only the first one writes into it.

A file that was damaged or changed is refused before it is used. `manifest.json` has the SHA-256 of
the files. It is written once for the files of an epoch, and before them, with the digests of those
that they replace, which are accepted until the checkpoint, the last of them, is in place. So a
process that dies in between leaves a folder that can be read and resumed.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from selectconv import __version__
from selectconv.errors import BadValue, RunError, UsageError
from selectconv.files import read_json_lines, write_text, write_whole

CONFIG, ENVIRONMENT, STATUS = "config.yaml", "env.json", "status.json"
STATUSES = ("running", "done", "failed", "interrupted")
METRICS, ALLOCATION = "metrics.jsonl", "allocation.jsonl"
CHECKPOINT, PREVIOUS, MANIFEST = "last.ckpt", "previous.ckpt", "manifest.json"
LAST, BEST = "last.safetensors", "best.safetensors"
HOLDOUT, IMAGES, TENSORBOARD = "holdout.json", "images.json", "tensorboard"
OWN: tuple[str, ...] = (
    CONFIG, ENVIRONMENT, STATUS, METRICS, ALLOCATION, CHECKPOINT, PREVIOUS, LAST, BEST, HOLDOUT,
    IMAGES, MANIFEST, TENSORBOARD,
)  # fmt: skip
# What `compress`, `export`, `report` and `reproduce --time` make of a run, in its folder.
COMPRESSED, ONNX, REPORT, TIME = (
    "compressed.safetensors", "model.onnx", "report.html", "time.json",
)  # fmt: skip
LOCK, HOLDER = ".lock", ".lock.txt"
_LOCK_FILES = (LOCK, HOLDER, f"{HOLDER}.part")
# What a start that was cut short, before it wrote its settings, may leave behind.
_BEGINNINGS = (MANIFEST, f"{MANIFEST}.part", f"{CONFIG}.part")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is created if need be, while the block runs.

    The system releases the lock when its process dies.

    Raises:
        UsageError: another process holds it; the message names that one.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    holder, lock = folder / HOLDER, FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = holder.read_text(encoding="utf-8") if holder.exists() else "another process"
        raise UsageError(
            f"{folder} is in use by {who}: wait until it ends, stop it, or choose another --out."
        ) from None
    try:
        write_text(holder, f"process {os.getpid()} on {platform.node()}")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def check_free(folder: Path) -> None:
    """Refuse a folder that another process holds; nothing is created.

    Raises:
        UsageError: another process holds it; the message names that one.
    """
    if (folder / LOCK).exists():
        with locked(folder):
            return


def is_first_process() -> bool:
    """Return whether this process looks after the run's folder; under torchrun one of them does."""
    return os.environ.get("RANK", "0") == "0"


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
        # Where there is no run, a model.onnx is somebody else's.
        own = (*OWN, COMPRESSED, ONNX, REPORT, TIME) if (self / CONFIG).exists() else OWN
        for entry in self._entries():
            if entry.name.removesuffix(".part") not in own:
                raise UsageError(
                    f"{self.path} holds {entry.name!r}, which no run wrote: nothing was deleted; "
                    "choose another --out."
                )

    def clear(self) -> None:
        """Delete a run's own files; refuse a folder that holds anything else.

        Raises:
            UsageError: there are files that no run wrote.
        """
        if not is_first_process():
            return
        self.check_own()
        # The settings last: until then it is a run, and a second try deletes the rest.
        for entry in sorted(self._entries(), key=lambda entry: entry.name == CONFIG):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def start(self, config: Mapping[str, Any]) -> None:
        """Write the settings and the environment into the folder, which exists."""
        settings = yaml.safe_dump(dict(config), sort_keys=False)
        self.write({CONFIG: settings.encode(), ENVIRONMENT: dump_page(describe_environment())})
        self.set_status("running")

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write the manifest, then the files in this order; a checkpoint comes last.

        Raises:
            RunError: one cannot be written; the run can still be resumed.
        """
        if not is_first_process():
            return
        record = _read_manifest(self.path)
        for name, content in contents.items():
            record["before"][name] = _digest(self / name)
            record["files"][name] = hashlib.sha256(content).hexdigest()
        # The manifest has a digest, too: a file whose name is damaged there would not be checked.
        whole = {**record, "digest": _digest_of(record)}
        write_text(self / MANIFEST, json.dumps(whole, indent=1) + "\n")
        for name, content in contents.items():
            write_whole(self / name, content)

    def check(self, name: str) -> Path:
        """Return the path of a file as the run wrote it; it does not exist if the run did not.

        Raises:
            RunError: it was damaged, changed or deleted.
        """
        path, previous = self / name, self / PREVIOUS
        # A run may replace the file between a look at it and one at the manifest.
        if any(_is_accepted(path) for _ in range(3)):
            return path
        remedy = "restore it, or train again"
        if name == CHECKPOINT and previous.exists() and _is_accepted(previous):
            remedy = (
                f"{PREVIOUS}, of the epoch before, is intact: rename it to {CHECKPOINT}, "
                "then --resume"
            )
        raise RunError(f"{path} is damaged: it is not what the run wrote; {remedy}.")

    def read_config(self) -> dict[str, Any]:
        """Read the settings of the run.

        Raises:
            UsageError: they are missing.
            RunError: they are not what the run wrote.
        """
        if not (self / CONFIG).exists():
            lack = f"it has no {CONFIG}" if self.path.exists() else "there is no such folder"
            raise UsageError(f"{self.path} is not a run: {lack}.")
        path = self.check(CONFIG)
        try:
            return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
            raise RunError(f"{path} cannot be read: {str(error).splitlines()[0]}.") from error

    def read_environment(self) -> dict[str, Any]:
        """Read commit, versions, hardware and digest of the data; older runs lack the last.

        Raises:
            RunError: the file is not what the run wrote.
        """
        return dict(json.loads(self.check(ENVIRONMENT).read_bytes()))

    def status(self) -> str:
        """Return the status, one of `STATUSES`; without a file it is `running`.

        Raises:
            RunError: the file is damaged.
        """
        path = self / STATUS
        try:
            content = path.read_bytes() if path.exists() else b'{"status": "running"}'
            return STATUSES[STATUSES.index(json.loads(content)["status"])]
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(f"{path} is damaged; delete it, and go on with --resume.") from error

    def set_status(self, status: str, message: str | None = None) -> None:
        """Write the status, with a message for a failed run; without settings there is no run."""
        if is_first_process() and (self / CONFIG).exists():
            content = (
                {"status": status} if message is None else {"status": status, "message": message}
            )
            write_text(self / STATUS, json.dumps(content) + "\n")

    def read(self, name: str) -> list[dict[str, Any]]:
        """Read a jsonl file; a run that has not written it has no lines.

        Raises:
            RunError: it was damaged or changed.
        """
        path = self.check(name)
        return read_json_lines(path) if path.exists() else []

    def cut_after(self, epoch: int) -> None:
        """Drop the lines of epochs after the checkpoint's: those epochs will be run again."""
        for name in (METRICS, ALLOCATION):
            rows = self.read(name)
            kept = [row for row in rows if row["epoch"] <= epoch]
            if kept != rows:
                self.write({name: dump_lines(kept)})


def dump_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as lines of JSON; floats keep all their digits."""
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def dump_page(content: Mapping[str, Any]) -> bytes:
    """Return JSON to be read by people."""
    return (json.dumps(content, indent=2) + "\n").encode()


def _is_accepted(path: Path) -> bool:
    """Return whether a file is what the run wrote; a missing one, if it never wrote it."""
    record, found = _read_manifest(path.parent), _digest(path)
    files, before = record["files"], record["before"]
    # The user may have put the checkpoint before in the place of the last one.
    is_previous = path.name == CHECKPOINT and found == files.get(PREVIOUS, "none")
    if found == files.get(path.name) or is_previous:
        return True
    is_complete = CHECKPOINT in files and _digest(path.parent / CHECKPOINT) == files[CHECKPOINT]
    return not is_complete and path.name in before and found == before[path.name]


def _digest(path: Path) -> str | None:
    """Return a file's digest; None if there is no such file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from error


def _digest_of(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, dict[str, str | None]]:
    path = folder / MANIFEST
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        if record.pop("digest") != _digest_of(record):
            raise BadValue("it is not what the run wrote")
        return record
    except FileNotFoundError:
        return {"files": {}, "before": {}}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}; restore it, or train again.") from error


def describe_environment() -> dict[str, Any]:
    """Collect what results depend on besides the settings: commit, versions, hardware."""
    import torch  # takes seconds, and reading a folder does not need it

    # Installed in somebody's repository, that repository would answer.
    is_ours = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    # torch's own word names its build as well, such as 2.13.0+cpu.
    versions = {"selectconv": __version__, "torch": str(torch.__version__)}
    hardware = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        hardware = ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    return {
        "commit": _git("rev-parse", "HEAD") if is_ours else None,
        "dirty": is_ours and bool(_git("status", "--porcelain")),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions | {name: version(name) for name in ("numpy", "lightning-fabric")},
        "hardware": hardware,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _git(*arguments: str) -> str | None:
    """Ask git about the package's own source tree; None where it is installed without one."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        answer = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
