"""Every command of README, docs and `--help` is carried out, in one process, as small as it gets.

A training or a grid is only planned (`--dry-run`); what reads runs reads tiny ones. `SMALLER` says
what is added to a command, and `UNTRIED` which commands are not carried out here, and why.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

import torchvision_shim
from data_files import write_jpeg
from fake_runs import write_run
from selectconv.__main__ import main
from selectconv.lab.cli.main import VERBS, _load
from selectconv.lab.train import estimate

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md",
         ROOT / "benchmarks" / "SPEED.md", *sorted((ROOT / "docs").glob("*.md"))]  # fmt: skip
SMALLER = {
    "train": ["--dry-run"],
    "reproduce": ["--dry-run"],
    "compress": ["--repeats", "1"],
    # Two images in place of many; the network is that of the reader's own folder.
    "bench": ["--repeats=1", "--batch-size=2", "--image-size=8", "--model=mynet:small"],
    "bench alloc": ["--repeats=1", "--image-size=8", "--model=mynet:small"],
}
UNTRIED = {
    "selectconv bench": "a part of a command",
    "selectconv report DIR...": "any number of folders",
    "selectconv data fetch fashion-mnist": "needs a network; tests of fetching have their own",
    "selectconv train --out runs/first --resume": "needs a checkpoint; test_resume.py resumes runs",
    "selectconv data digest cifar10": "needs the images; test_train_command.py has a digest",
    "selectconv reproduce TABLE --scale reduced --time": "measures for an hour",
    "selectconv reproduce table1 --scale full --no-run --out all": "of test_reproduce_command.py",
    "selectconv models": "builds all networks; test_cli.py does it",
    "python examples/fetch_fashion_mnist.py": "needs apt; test_examples.py has one of its own",
    "python examples/smaller.py": "test_examples.py runs it",
    "python benchmarks/shifted_convs.py": "takes minutes",
    "python benchmarks/gather_cost.py": "takes minutes",
    "python benchmarks/speed.py": "takes an hour",
    "python benchmarks/speed.py pruning": "takes half an hour",
}
# What the pages leave to the reader; and one run for all commands that read one.
FILLED = {
    "runs/densenet40-cifar10-select-0": "runs/first",
    "DIR": "runs/first",
    "NAME": "densenet40-cifar10-plain-20",
    "HOST": "localhost",
}


def read_commands():
    """Return the words of the commands of all pages and examples, by line, each once."""
    found = [command for verb in VERBS for command, _ in _load(verb).EXAMPLES]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        found += [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        found += re.findall(r"`((?:selectconv|python|torchrun|make|pip) [^`\n]+)`", prose)
    commands = [shlex.split(line, comments=True) for line in found]
    return {" ".join(c): c for c in commands if c}


COMMANDS = read_commands()


def of_kind(*beginnings):
    return [line for line in COMMANDS if line.startswith(beginnings) and line not in UNTRIED]


def filled(beginning):
    """Return commands with what the pages leave out filled in, each once."""
    pattern = rf"(?<!\w)({'|'.join(map(re.escape, FILLED))})(?!\w)"
    commands = [
        [re.sub(pattern, lambda found: FILLED[found[1]], word) for word in COMMANDS[line]]
        for line in of_kind(beginning)
    ]
    return [pytest.param(c, id=line) for line, c in {" ".join(c): c for c in commands}.items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the pages speak of: runs, images, a network, settings."""
    folder = tmp_path_factory.mktemp("reader")
    small = {"model_options": {"growth_rate": 4, "units": [1, 1]}, "epochs": 2}
    write_run(folder / "runs" / "first", weights=True, method="select", **small)
    write_run(folder / "runs" / "second", method="plain", **small)
    for name, method in (("first", "select"), ("second", "plain")):  # figures of weights take long
        write_run(folder / "without_weights" / "runs" / name, method=method, **small)
    run = "results/ablation/runs/densenet40-cifar10-plain-20"
    shutil.copytree(ROOT / run, folder / run)
    pytest.importorskip("PIL.Image", reason="images need Pillow (the train extra)")
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        write_jpeg(folder / "photos" / name / "1.jpg", 100, size=(16, 16))
    (folder / "mynet.py").write_text(
        "from torch import nn\n"
        "def small(num_classes, in_channels, width=16):\n"
        "    return nn.Sequential(\n"
        "        nn.Conv2d(in_channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(),\n"
        "        nn.Conv2d(width, num_classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    (settings,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL
    )
    assert yaml.safe_load(settings)["model"] == "densenet40"
    (folder / "run.yaml").write_text(settings)
    return folder


@pytest.fixture
def reader(place, monkeypatch):
    """Someone who types the commands there. Times are not measured: tests of estimates do that."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(estimate, "seconds_per_image", lambda model, config, info: 1e-3)
    monkeypatch.setattr(
        estimate, "estimate_seconds", lambda configs, threads: dict.fromkeys(configs, 60.0)
    )
    return place


def carry_out(words):
    """Carry out the words after `selectconv`."""
    if any("timm:" in word for word in words):
        torchvision_shim.install()
        pytest.importorskip("timm")
    if "onnxruntime" in words or words[0] == "export" or "--table" in words:
        pytest.importorskip("onnxruntime")
    usual = SMALLER.get(words[0], [])
    smaller = [] if "--dry-run" in words else SMALLER.get(" ".join(words[:2]), usual)
    assert main([*words, *smaller]) == 0


@pytest.mark.parametrize("words", filled("selectconv "))
def test_commands_work(words, reader, monkeypatch, capsys):
    words = words[1:]
    folder = reader / "without_weights" if words[0] == "report" else reader
    monkeypatch.chdir(folder)
    carry_out(words)
    shown = capsys.readouterr()
    assert shown.out
    assert "Traceback" not in shown.err
    if words[0] == "eval":
        assert "error" in shown.out
    written = re.findall(r"wrote (\S+)", shown.out)
    assert all((folder / name.rstrip(",.:;")).exists() for name in written)


@pytest.mark.parametrize("words", filled("torchrun "))
def test_torchrun_takes_the_commands(words, reader, capsys):
    options = get_args_parser().parse_args(words[1:])
    assert (options.module, options.training_script) == (True, "selectconv")
    carry_out(options.training_script_args)
    assert "about" in capsys.readouterr().out


def test_make_knows_the_targets():
    targets = [line.removeprefix("make ") for line in of_kind("make ")]
    assert len(targets) > 10
    done = subprocess.run(
        ["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_pip_finds_the_extras():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in of_kind("pip "):
        for extras in re.findall(r"\[(.*)\]", line):
            assert set(extras.split(",")) <= set(known), line


@pytest.mark.parametrize("line", of_kind("python -m soak"))
def test_soak_takes_the_commands(line, monkeypatch):
    # A campaign takes hours: what is carried out is tested in test_soak.py.
    monkeypatch.syspath_prepend(str(ROOT))
    from soak import __main__ as soak

    carried_out = []
    monkeypatch.setattr(soak, "carry_out", lambda name, options: carried_out.append(name) or 0)
    monkeypatch.setattr(
        sys, "argv", ["soak", *line.replace("NAME", "damage").replace("N", "1").split()[3:]]
    )
    assert soak.main() == 0
    assert carried_out


def test_no_command_is_forgotten():
    kinds = ("selectconv ", "torchrun ", "make ", "pip ", "python -m soak")
    assert set(COMMANDS) - set(of_kind(*kinds)) == set(UNTRIED)
