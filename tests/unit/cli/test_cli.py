"""The command: verbs, help, exit codes, signals, what is said without the extra."""

import io
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from rich.console import Console

import selectconv as sc
from said import complaint
from selectconv.__main__ import main
from selectconv.allocate.report import AllocationReport
from selectconv.core.layer import SelectConv2d
from selectconv.core.plan import AllocationPlan
from selectconv.lab.cli.display import RunDisplay
from selectconv.lab.cli.main import VERBS, build_parser
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.train import estimate
from selectconv.lab.train.config import resolve, setting_names
from selectconv.lab.train.network import build_model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "train, eval, compress, export, report, reproduce, data, models, bench"),
        (["tran"], "got 'tran'. Did you mean 'train'"),
        (["models", "--jsn"], "Did you mean '--json'"),
        (["data"], "required: action"),
        (["data", "get"], "list, fetch, digest; got 'get'"),
        (["data", "fetch"], "fetch needs a data set"),
        (["data", "fetch", "cifar"], "Did you mean 'cifar10'"),
        (["bench", "stp"], "Did you mean 'step'"),
        (["bench", "step", "--repeats", "0"], "--repeats: must be a whole number of at least 1"),
        (["eval"], "required: dir"),
        (["eval", "nowhere"], "nowhere is not a run"),
        (["compress", "nowhere"], "nowhere is not a run"),
        (["export", "nowhere"], "nowhere is not a run"),
        (["eval", __file__], "test_cli.py is not a run"),
        (["compress", "nowhere", "--round-to", "0"], "--round-to: must be a whole number"),
        (["eval", "x" * 300], "x/config.yaml cannot be a file or folder: File name too long."),
        (["report", ".", "--out", "x" * 300], "x cannot be a file or folder: File name too long."),
    ],
)
def test_wrong_input_is_one_line_and_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in complaint(capsys)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "selectconv train --data digits"),
        (["--help"], 0, "usage: selectconv"),
        (["models"], 0, "211,978"),
    ],
)
def test_what_it_says(words, code, said, capsys):
    assert main(words) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_help_ends_with_examples_and_shows_each_default_once(verb, capsys):
    assert main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"usage: selectconv {verb}" in said
    assert f"selectconv {verb}" in said.partition("examples:")[2]
    for action in build_parser(verb)._actions:
        assert (action.help or "").count("default") <= 1, action.dest


def test_every_setting_has_a_flag_and_those_that_people_change_first_come_first():
    flags = [action.dest for action in build_parser("train")._actions]
    assert flags[1:7] == ["model", "data", "method", "epochs", "gamma", "seed"]
    own = ["help", "config", "out", "resume", "overwrite", "dry_run"]
    assert sorted(flags) == sorted([*own, *setting_names()])


def test_models_lists_the_zoo(capsys):
    assert main(["models", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["name"]: row["macs"] for row in rows}["densenet40"] == 71_334_240
    assert len(rows) == len(sc.list_models()) == 8


def test_data_list_says_where(capsys, tmp_path):
    assert main(["data", "list", "--root", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "not found" in said
    assert "scikit-learn" in said


@pytest.mark.parametrize(
    ("words", "missing", "code"),
    [(["train"], "yaml", 1), (["eval", "run"], "lightning_fabric", 1), (["--version"], "yaml", 0)],
)
def test_without_the_extra_it_says_what_to_install(words, missing, code, tmp_path):
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('gone', name='{missing}')")
    said = f"selectconv: the command line needs {missing}: pip install 'selectconv[train]'\n"
    assert run_apart(words, tmp_path) == (code, said if code else "")


def run_apart(words, folder, **options):
    """Run a command in a process of its own, whose modules are those of a folder first."""
    with start(words, folder, **options) as process:
        _, said = process.communicate(timeout=60)
    return process.returncode, said


def start(words, folder, stdout=subprocess.PIPE):
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-m", "selectconv", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**environment, "PYTHONPATH": paths},
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
@pytest.mark.parametrize("words", [["--version"], ["data", "--help"]])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(words, tmp_path):
    with open("/dev/full", "w") as full:
        ended = run_apart(words, tmp_path, stdout=full)
    said = "selectconv: the output cannot be written: No space left on device.\n"
    assert ended == (1, said)


# As numpy's half-finished import does, it swallows Ctrl-C.
SLOW_TORCH = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    pass
raise ImportError("only half of it is there")
"""


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, "interrupted; trainings"),
        (signal.SIGTERM, 1, "stopped by SIGTERM; trainings"),
    ],
)
@pytest.mark.parametrize("verb", [["train", "--data", "digits"], ["eval", "runs/first"]])
def test_a_signal_while_torch_is_imported_is_one_line(verb, number, code, words, tmp_path):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    with start(verb, tmp_path) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == code
    assert said.startswith(f"selectconv: {words}")
    assert said.count("\n") == 1


def test_signals_are_left_as_they_were_where_python_calls_the_command(capsys):
    def mine(number, frame):
        """Do nothing."""

    before, other = signal.signal(signal.SIGINT, mine), signal.getsignal(signal.SIGTERM)
    try:
        assert main(["data", "list"]) == 0
        assert signal.getsignal(signal.SIGINT) is mine
        assert signal.getsignal(signal.SIGTERM) is other  # Ray leaves its own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_warning_of_ours_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "argv", ["selectconv", "--version"])
    assert main() == 0
    said = warnings.formatwarning(sc.SelectConvWarning("a\nb"), sc.SelectConvWarning, "f.py", 3)
    assert said == "selectconv: warning: a b\n"
    assert warnings.formatwarning("other", UserWarning, "f.py", 3).startswith("f.py:3: UserWarn")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "a second"),
        (100, "100 seconds"),
        (1000, "17 minutes"),
        (2e4, "6 hours"),
        (4e5, "5 days"),
    ],
)
def test_durations_as_people_say_them(seconds, said):
    assert estimate.describe_duration(seconds) == said


@pytest.mark.parametrize(
    ("method", "share_moved", "share_shifted"),
    [("select", 0.2, 0.2), ("zero", 0.2, 0.0), ("shift", 0.0, 1.0), ("dealloc", 0.0, 0.0)],
)
def test_a_time_per_image_is_that_of_a_trained_network_and_changes_no_random_numbers(
    method, share_moved, share_shifted
):
    info = DatasetInfo("tiny", "tiny", 10, (1, 8, 8), 10, 10, 1, False, (0.5,), (0.5,))
    config = resolve({"data": "digits", "batch_size": 2, "method": method})
    model = build_model(config, info)
    before = torch.get_rng_state()
    assert estimate.seconds_per_image(model, config, info) > 0
    assert torch.equal(torch.get_rng_state(), before)
    layers = [m for m in model.modules() if isinstance(m, SelectConv2d) and m.kernel_size == (1, 1)]
    slots = sum(layer.in_channels for layer in layers)
    assert sum(int(m.moved.sum()) for m in layers) / slots == pytest.approx(share_moved, abs=0.01)
    shifted = sum(int(m.shifted.sum()) for m in layers)
    assert shifted / slots == pytest.approx(share_shifted, abs=0.01)


ROW = {"train_loss": 0.5, "test_loss": 0.4, "test_error": 12.5, "images_per_second": 99.0}
ROW |= {"moved": 7, "closed": 8}


class Loader:
    def __len__(self):
        return 3

    def epoch(self, epoch):
        return iter([(epoch, number) for number in range(3)])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_a_bar_and_everyone_one_line_per_epoch(is_terminal):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=100)
    display = RunDisplay(resolve({"data": "digits", "epochs": 5}), console)
    with display.bar:
        for epoch in (3, 4):
            assert list(display.batches(Loader(), epoch, "train")) == [(epoch, n) for n in range(3)]
            assert len(list(display.batches(Loader(), epoch, "test"))) == 3
            display.epoch_done({"epoch": epoch, **ROW}, AllocationReport(epoch, AllocationPlan()))
        assert display.bar.live.is_started == is_terminal
    (task,) = display.bar.tasks
    assert task.completed == task.total == 15
    assert task.description == "epoch 4, test"
    lines = screen.getvalue().splitlines()
    assert screen.getvalue().count("12.50 %") == 2
    if not is_terminal:
        first, head, *rest = lines
        assert first == "resumed at epoch 3"
        assert head.startswith("epoch")
        assert len(rest) == 2
