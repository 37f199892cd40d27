"""Damaged, swapped and hostile files: refused by name, or harmless; never used without a word."""

import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from selectconv.lab.train.run_folder import RunFolder
from soak.commands import check_words, differences, interrupted, run, undisturbed
from soak.driver import DIFFERENT, EXECUTED, FOREIGN, Ended, Wrong

TITLE = "damaged files (flipped, cut, zeroed, swapped, deleted, hostile), then used"
WANTED = "refused in a line, or the same result; nothing in a file is ever executed"
COUNT, LIMIT_S = 200, 3600

# What is done with a run, and which of its files are damaged before.
USES = {
    "resume": (
        "config.yaml", "last.ckpt", "previous.ckpt", "manifest.json", "status.json",
        "metrics.jsonl", "allocation.jsonl", "last.safetensors", "best.safetensors",
    ),
    "eval": ("config.yaml", "last.safetensors", "manifest.json"),
    "compress": ("config.yaml", "last.safetensors", "manifest.json"),
    "report": ("config.yaml", "metrics.jsonl", "allocation.jsonl", "status.json", "manifest.json"),
    "load": ("small.safetensors",),
}  # fmt: skip


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Damage a file of a run, then use the run."""
    use = draw.choices(list(USES), (6, 3, 2, 2, 4))[0]
    name, how = draw.choice(USES[use]), draw.choice(list(DAMAGES))
    folder = scratch / "run"
    shutil.copytree(interrupted() if use == "resume" else finished(), folder)
    marker = scratch / "executed"
    is_known = how != "hostile" or name.endswith((".ckpt", ".yaml", "small.safetensors"))
    how = how if is_known else "flipped"
    content = DAMAGES[how](draw, folder / name, marker)
    what = f"{use}: {name} {how}"
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    is_forged = how == "hostile" and name != "small.safetensors"
    if is_forged:  # by someone who knows of the digests
        forge(folder, name)
    result = use_run(what, use, folder, scratch)
    if marker.exists():
        raise Wrong(what, EXECUTED, f"{result}")
    if result.startswith("refused") or is_forged:
        return Ended(what, result.partition(":")[0], result)
    return Ended(what, "the same")


def use_run(what: str, use: str, folder: Path, scratch: Path) -> str:
    """Use a run; return the line that refuses it, or "the same".

    Raises:
        Wrong: it is neither refused properly nor the same as without damage.
    """
    if use == "load":
        return load(what, folder / "small.safetensors")
    small, page = scratch / "again.safetensors", scratch / "page.html"
    words: dict[str, list[Any]] = {
        "resume": ["train", "--resume", "--out", folder],
        "eval": ["eval", folder, "--json"],
        "compress": ["compress", folder, "--out", small],
        "report": ["report", folder, "--out", page],
    }
    ended = run(*words[use])
    if ended.code:
        return "refused: " + check_words(what, ended)
    if use == "resume":
        changed = differences(folder, undisturbed())
    elif use == "eval":
        changed = [] if json.loads(ended.out) == evaluated() else [ended.out]
    elif use == "compress":
        same = small.read_bytes() == (finished() / "small.safetensors").read_bytes()
        changed = [] if same else [small.name]
    else:
        changed = [] if _anonymous(page, folder) == reported() else [page.name]
    if changed:
        raise Wrong(what, DIFFERENT, f"{', '.join(changed)}; said {ended.err.strip()!r}")
    return "the same"


def load(what: str, path: Path) -> str:
    """Load a compressed model and compare its outputs, bit by bit."""
    import torch

    import selectconv as sc

    try:
        model = sc.load_compressed(path)
    except sc.SelectConvError as error:
        return f"refused: {error}"
    except Exception as error:
        raise Wrong(what, FOREIGN, f"{type(error).__name__}: {error}") from error
    x = torch.linspace(-1, 1, 3 * 64).reshape(3, 1, 8, 8)
    wanted = sc.load_compressed(finished() / "small.safetensors")
    try:
        with torch.no_grad():
            is_same = torch.equal(model(x), wanted(x))
    except Exception as error:
        raise Wrong(what, DIFFERENT, f"it loads, then {type(error).__name__}: {error}") from error
    if not is_same:
        raise Wrong(what, DIFFERENT, "other outputs")
    return "the same"


@cache
def finished() -> Path:
    """Return the folder of a finished run with a compressed model in it."""
    folder = undisturbed()
    ended = run("compress", folder, "--out", folder / "small.safetensors")
    assert ended.code == 0, ended.err
    return folder


@cache
def evaluated() -> Any:
    """Return what `eval` says about the run."""
    return json.loads(run("eval", finished(), "--json").out)


@cache
def reported() -> str:
    """Return the page that `report` writes about the run."""
    page = finished().parent / "page.html"
    assert run("report", finished(), "--out", page).code == 0
    return _anonymous(page, finished())


def _anonymous(page: Path, folder: Path) -> str:
    return page.read_text(encoding="utf-8").replace(str(folder), "FOLDER")


def forge(folder: Path, name: str) -> None:
    """Record a damaged file's digest."""
    RunFolder(folder).write({name: (folder / name).read_bytes()})


def flipped(draw: random.Random, path: Path, marker: Path) -> bytes:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def overwritten(draw: random.Random, path: Path, marker: Path) -> bytes:
    """Overwrite a stretch with zeros or with noise."""
    content = bytearray(path.read_bytes())
    start, length = draw.randrange(len(content)), draw.choice((1, 8, 512, 4096))
    length = min(length, len(content) - start)
    content[start : start + length] = draw.choice((bytes(length), draw.randbytes(length)))
    return bytes(content)


def cut(draw: random.Random, path: Path, marker: Path) -> bytes:
    """Cut the end off; all of it, sometimes."""
    content = path.read_bytes()
    return content[: draw.choice((0, draw.randrange(len(content)), len(content) - 1))]


def longer(draw: random.Random, path: Path, marker: Path) -> bytes:
    """Append noise."""
    return path.read_bytes() + draw.randbytes(draw.choice((1, 100)))


def swapped(draw: random.Random, path: Path, marker: Path) -> bytes:
    """Put another file in its place: of another run, or of the same one."""
    other = undisturbed(1) / path.name
    files = [entry for entry in path.parent.iterdir() if entry.is_file() and entry != path]
    choices = [*([other] if other.exists() else []), draw.choice(sorted(files))]
    return draw.choice(choices).read_bytes()


def deleted(draw: random.Random, path: Path, marker: Path) -> None:
    """Delete it."""


class Touch:
    """What a hostile pickle holds: loading it would create the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def hostile(draw: random.Random, path: Path, marker: Path) -> bytes:
    """Put code in its place, in as many ways as the file's format has room for."""
    if path.suffix == ".yaml":
        tag = draw.choice(("object/apply", "object/new"))
        line = f"!!python/{tag}:os.system ['touch {marker}']"
        return draw.choice((line, f"{path.read_text()}\ndata_root: {line}\n")).encode()
    if path.suffix == ".ckpt":
        import torch

        file = io.BytesIO()
        if draw.random() < 0.5:
            state = {**torch.load(path, weights_only=True), "epoch": Touch(marker)}
            torch.save(state, file)
            return file.getvalue()
        return pickle.dumps(Touch(marker))
    return hostile_description(draw, path, marker)


def hostile_description(draw: random.Random, path: Path, marker: Path) -> bytes:
    """Put code into the description of a compressed model."""
    from safetensors import safe_open
    from safetensors.torch import load, save

    content = path.read_bytes()
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()["selectconv"])
    code = f"__import__('os').system('touch {marker}')"
    steps = described["steps"]
    step = draw.choice([step for step in steps if step[0] not in ("placeholder", "output")])
    attack = draw.randrange(7)
    if attack == 0:
        step[0], step[2], step[3] = "call_function", "os.system", [f"touch {marker}"]
    elif attack == 1:
        step[0], step[2] = "call_method", f"relu() or {code} or x.relu"
    elif attack == 2:
        step[1] = f"x = {code}"
    elif attack == 3:
        steps[0][2] = f"x={code}"
    elif attack == 4:
        step[4] = {"dict": {f"a={code}, b": 1}}
    elif attack == 5:
        step[0], step[2], step[3] = "call_function", "getattr", [{"node": steps[0][1]}, "__class__"]
    else:
        name = next(iter(described["modules"]))
        described["modules"][name] = ["GraphModule", {"dict": {"root": code, "graph": code}}]
    metadata = {"selectconv": json.dumps(described)}  # an attacker leaves the digest out
    return save(load(content), metadata)


DAMAGES: dict[str, Callable[[random.Random, Path, Path], bytes | None]] = {
    function.__name__: function
    for function in (flipped, overwritten, cut, longer, swapped, deleted, hostile)
}
