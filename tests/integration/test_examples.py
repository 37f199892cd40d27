"""Every example runs, re-allocates channels, and ends clearly better than it began."""

import copy
import difflib
import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_files import write_fashion_mnist
from selectconv import load_compressed
from selectconv.lab.data import registry
from shimmed_run import TIMEOUT_S, run_shimmed

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# Where each example's figure must end; it begins near chance: 0.1 for ten digits, 0.25 for four
# waves, 0.1 for the overlap of discs.
ENOUGH = {
    "plain_loop": 0.85,
    "selective_loop": 0.85,
    "amp_gradscaler": 0.85,
    "ema_follower": 0.85,
    "signal_1d": 0.85,
    "unet_segmentation": 0.4,
}


@pytest.fixture(autouse=True)
def _beside_the_examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def figures(output):
    """The last line's figures, before and after."""
    start, end = re.fullmatch(r"test \w+: (\S+) -> (\S+)", output.splitlines()[-1]).groups()
    return float(start), float(end)


def moved_slots(output):
    return sum(map(int, re.findall(r"(\d+) re-allocated in \d+ layer", output)))


@pytest.mark.parametrize("name", ENOUGH)
@pytest.mark.filterwarnings("default:.*treespec, LeafSpec:FutureWarning")
def test_the_network_improves(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    start, end = figures(output)
    assert end >= ENOUGH[name]
    assert start <= ENOUGH[name] / 2
    assert (moved_slots(output) > 0) == (name != "plain_loop")


@pytest.mark.timeout(600)
def test_a_trained_network_gets_smaller(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["smaller", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "smaller.py"), run_name="__main__")
    table = re.findall(
        r"\| ([^|]+) \| ([\d,]+) \| ([\d,]+) .* ([\d.]+)% \|", capsys.readouterr().out
    )
    rows = {name: [float(cell.replace(",", "")) for cell in cells] for name, *cells in table}
    (params, macs, before), (_, half, after), *beside = rows.values()
    assert abs(half / macs - 0.5) < 0.01
    assert min(before, after) > 90
    assert all(abs(row[1] / half - 1) < 0.1 for row in beside)
    small = load_compressed(tmp_path / "small.safetensors")
    assert sum(p.numel() for p in small.parameters()) < 0.6 * params
    assert (tmp_path / "small.onnx").exists()


def test_the_docs_show_the_diff_of_the_twins():
    plain, selective = (
        (EXAMPLES / f"{name}.py").read_text().splitlines()[1:]  # the docstring names the twin
        for name in ("plain_loop", "selective_loop")
    )
    changes = {line for line in difflib.ndiff(plain, selective) if line[0] in "+-"}
    page = (ROOT / "docs" / "loops.md").read_text()
    shown = re.search(r"```diff\n(.*?)```", page, re.DOTALL)[1].splitlines()
    shown = {f"{line[0]} {line[1:]}" for line in shown if line[0] in "+-"}
    assert len(shown) == 5
    assert {line for line in changes if line[2:].strip()} == {"+ import selectconv as sc", *shown}


def test_every_example_is_tested():
    others = {"demo", "digits", "fetch_fashion_mnist", "lightning_trainer", "smaller"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ENOUGH) | others


def offline(monkeypatch, tmp_path, **programs):
    """Let no host answer and no cache hold anything; these are the programs beside the usual."""

    def no_answer(request, timeout):
        raise OSError("no network today")

    monkeypatch.setattr("urllib.request.urlopen", no_answer)
    monkeypatch.setattr(registry, "SYSTEM_FOLDER", tmp_path / "nothing")
    monkeypatch.delenv("SELECTCONV_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, text in programs.items():
        (tmp_path / name.replace("_", "-")).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name.replace("_", "-")).chmod(0o755)


def test_the_demo_says_what_it_shows_without_fashion_mnist(tmp_path, monkeypatch, capsys):
    offline(monkeypatch, tmp_path, apt_get="exit 100")
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "is not available: no network today" in shown
    assert "too few to show a gain" in shown
    assert re.search(r"plain │ [\d.]+ % │( [\d.]+ │){3} [\d,]+ │ [\d,]+ │", shown)
    assert "One seed proves little" not in shown  # that is about Fashion-MNIST
    assert (tmp_path / "out" / "report.html").exists()
    assert not (tmp_path / "cache" / "selectconv" / "fashion-mnist").exists()


def test_the_demo_takes_debians_package_where_the_host_does_not_answer(tmp_path, monkeypatch):
    place = '"$3/usr/share/datasets"'
    offline(
        monkeypatch, tmp_path,
        apt_get='case "$*" in *download*) echo > dataset-fashion-mnist_1_all.deb;; esac',
        dpkg_deb=f"mkdir -p {place} && cp -r {tmp_path}/packaged {place}/fashion-mnist",
    )  # fmt: skip
    arrays = write_fashion_mnist(tmp_path / "packaged")
    assert runpy.run_path(str(EXAMPLES / "demo.py"))["is_available"](Console())
    train = registry.load_dataset("fashion-mnist", fetch=False).train
    assert np.array_equal(train.images[:, 0].numpy(), arrays["train-images-idx3-ubyte"])


def test_the_demo_is_one_seed_of_a_comparison(monkeypatch):
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    monkeypatch.setitem(demo["choose_seed"].__globals__, "fetch_dataset", lambda name: None)
    grid = demo["choose_seed"](23, Console())
    assert [run.name for run in grid.runs] == [
        "densenet40-fashion-mnist-plain-23",
        "densenet40-fashion-mnist-select-23",
    ]
    with pytest.raises(SystemExit, match="--seed must be from 20 to 29, got 5"):
        demo["choose_seed"](5, Console())
    wins, seeds = demo["count_wins"]()
    assert 0 <= wins <= seeds <= 10


@pytest.mark.timeout(TIMEOUT_S)
def test_lightning_improves_with_two_processes(tmp_path):  # with one: test_lightning.py
    done = run_shimmed([EXAMPLES / "lightning_trainer.py", 2], tmp_path)
    assert done.returncode == 0, done.stderr
    start, end = figures(done.stdout)
    assert end >= 0.85 > 0.4 >= start
    assert moved_slots(done.stdout) > 0
    logged = re.search(r"(\d) processes; logged last: \{'selectconv/moved': (\d+),", done.stdout)
    assert (int(logged[1]), int(logged[2]) > 0) == (2, True)
    assert "sync_dist" not in done.stderr


def test_the_docs_show_what_the_examples_hold():
    page = (ROOT / "docs" / "loops.md").read_text()
    example = (EXAMPLES / "lightning_trainer.py").read_text().splitlines()
    for snippet in re.findall(r"```py\n(.*?)```", page, re.DOTALL):
        assert [line for line in snippet.splitlines() if line not in example] == []
    assert all(f"../examples/{name}.py" in page for name in [*ENOUGH, "lightning_trainer"])


def shown_by(cell):
    """What a cell shows: its words without figures, and its pictures as bytes of PNG."""
    words, pictures = "", []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        pictures += [data["image/png"]] if "image/png" in data else []
        words += output.get("text", data.get("text/plain", ""))
    return re.sub(r"[\s\d.,]+", " ", re.sub(r";.*", "", words)), pictures


@pytest.mark.timeout(300)
def test_the_notebook_shows_what_it_stores():
    import nbclient
    import nbformat

    stored = nbformat.read(EXAMPLES / "look_inside.ipynb", as_version=4)
    fresh = copy.deepcopy(stored)
    nbclient.NotebookClient(fresh, timeout=TIMEOUT_S).execute()
    pictures = 0
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        (said, drawn), (now, redrawn) = shown_by(old), shown_by(new)
        assert (said, len(drawn)) == (now, len(redrawn))
        pictures += len(drawn)
    assert pictures == 3
