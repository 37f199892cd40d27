"""The command: verbs, help, exit codes, what is said without the extra."""

import builtins
import io
import json
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

import selectconv as sc
from said import complaint
from selectconv.__main__ import main
from selectconv.allocate.report import AllocationReport
from selectconv.core.layer import SelectConv2d
from selectconv.core.plan import AllocationPlan
from selectconv.lab.bench import interleave
from selectconv.lab.cli.display import Bars, Lines, choose_display
from selectconv.lab.cli.examples import next_commands, show_examples
from selectconv.lab.cli.main import VERBS, build_parser, show_warning
from selectconv.lab.cli.train import sections
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train import estimate
from selectconv.lab.train.config import resolve, setting_names
from selectconv.lab.train.network import build_model
from selectconv.lab.zoo import list_models


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "train, eval, compress, export, report, reproduce, data, models, bench"),
        (["tran"], "'tran'"),
        (["models", "--jsn"], "did you mean --json"),
        (["data"], "action"),
        (["data", "get"], "list, fetch; got 'get'"),
        (["data", "fetch"], "fetch needs a data set"),
        (["data", "fetch", "cifar"], "Did you mean 'cifar10'"),
        (["bench", "stp"], "Did you mean 'step'"),
        (["bench", "step", "--repeats", "0"], "at least 1, got 0"),
        (["eval"], "dir"),
        (["eval", "nowhere"], "nowhere is not a run"),
        (["compress", "nowhere"], "nowhere is not a run"),
        (["eval", __file__], "test_cli.py is not a run: it is a file"),
        (["eval", ""], "must be the folder of a run, got an empty name"),
        (["compress", "nowhere", "--round-to", "0"], "`round_to` must be at least 1"),
        (["export", "nowhere"], "nowhere is not a run"),
        (["eval", "x" * 300], "x/config.yaml cannot be a file or folder: File name too long."),
        (["report", ".", "--out", "x" * 300], "x cannot be a file or folder: File name too long."),
    ],
)
def test_wrong_input_is_one_line_and_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in complaint(capsys)


@pytest.mark.parametrize("verb", [[], *([verb] for verb in VERBS)])
def test_help_everywhere(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*verb, "--help"])
    assert ended.value.code == 0
    assert "usage: selectconv" in capsys.readouterr().out


def test_models_lists_the_zoo(capsys):
    assert main(["models"]) == 0
    assert "211,978" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["name"]: row["macs"] for row in rows}["densenet40"] == 71_334_240
    assert len(rows) == len(list_models()) == 8


def test_data_list_says_where(capsys, tmp_path):
    assert main(["data", "list", "--root", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "not found" in said
    assert "scikit-learn" in said


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "jsonargparse":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.startswith("selectconv.lab.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("selectconv.lab.cli", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["train"]) == 1
    assert "pip install 'selectconv[train]'" in complaint(capsys)
    assert main(["--version"]) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1():
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "selectconv", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert ended.returncode == 1
    assert ended.stderr == "selectconv: the output cannot be written: No space left on device.\n"


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
    [(signal.SIGINT, 130, "interrupted."), (signal.SIGTERM, 1, "stopped by SIGTERM.")],
)
@pytest.mark.parametrize("verb", [["train", "--data", "digits"], ["eval", "runs/first"]])
def test_a_signal_while_torch_is_imported_is_one_line(verb, number, code, words, tmp_path):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "selectconv", *verb],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said) == (code, f"selectconv: {words}\n")


def test_signals_are_left_as_they_were_where_python_calls_the_command(capsys):
    def mine(number, frame):
        """Do nothing."""

    before = signal.signal(signal.SIGINT, mine)
    try:
        assert main(["data", "list"]) == 0
        assert signal.getsignal(signal.SIGINT) is mine
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


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


def test_a_time_per_image_is_measured_without_touching_the_random_numbers():
    import torch

    info = DatasetInfo("tiny", "tiny", 10, (1, 8, 8), 10, 10, 1, False, (0.5,), (0.5,))
    before = torch.get_rng_state()
    assert estimate.seconds_per_image(resolve({"data": "digits", "batch_size": 2}), info) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_that_wait_for_each_other_do_not_lengthen_the_estimate(monkeypatch):
    import torch

    clock = 0.0

    def step():
        nonlocal clock
        clock += 8.0 if torch.get_num_threads() > 1 else 2.0  # two threads spin

    monkeypatch.setattr(estimate, "_now", lambda device: clock)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert estimate._time_step(step, torch.device("cpu")) == 2.0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("method", "share_moved", "share_shifted"),
    [("select", 0.2, 0.2), ("zero", 0.2, 0.0), ("shift", 0.0, 1.0), ("dealloc", 0.0, 0.0)],
)
def test_what_is_timed_is_allocated_as_a_training_leaves_it(method, share_moved, share_shifted):
    config = resolve({"data": "digits", "method": method})
    model = build_model(config, dataset_info("digits"))
    estimate.allocate_as_trained(model, config)
    layers = [m for m in model.modules() if isinstance(m, SelectConv2d) and m.kernel_size == (1, 1)]
    slots = sum(layer.in_channels for layer in layers)
    assert sum(int(m.moved.sum()) for m in layers) / slots == pytest.approx(share_moved, abs=0.01)
    shifted = sum(int(m.shifted.sum()) for m in layers)
    assert shifted / slots == pytest.approx(share_shifted, abs=0.01)


def test_both_sides_are_measured_in_turn():
    calls = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = interleave.in_turn(sides, repeats=2, seconds=0.0)
    assert calls == ["a", "a", "b", "b", *"abab"]  # warm-up and one call to see how long it takes
    assert {name: len(side) for name, side in times.items()} == {"a": 2, "b": 2}


def test_a_terminal_gets_a_bar_and_one_line_per_epoch():
    config = resolve({"data": "digits", "epochs": 2})
    screen = io.StringIO()
    display = choose_display(config, Console(file=screen, force_terminal=True, width=100))
    assert isinstance(display, Bars)

    class Loader:
        def __len__(self):
            return 3

        def epoch(self, epoch):
            return iter([(epoch, number) for number in range(3)])

    row = {"train_loss": 0.5, "test_loss": 0.4, "test_error": 12.5, "images_per_second": 99.0}
    for epoch in range(2):
        seen = list(display.batches(Loader(), epoch, "train"))
        assert seen == [(epoch, 0), (epoch, 1), (epoch, 2)]
        assert len(list(display.batches(Loader(), epoch, "test"))) == 3
        report = AllocationReport(epoch, AllocationPlan())
        display.epoch_done({"epoch": epoch, **row, "moved": 7, "closed": 8}, report)
    assert display.progress.tasks[0].completed == display.progress.tasks[0].total == 6
    assert display.progress.tasks[0].description == "epoch 1, test"
    assert display.progress.live.is_started
    display.close()
    assert not display.progress.live.is_started
    assert screen.getvalue().count("12.50 %") == 2


def test_a_log_gets_lines_only():
    config = resolve({"data": "digits"})
    screen = io.StringIO()
    display = choose_display(config, Console(file=screen, width=200))
    assert type(display) is Lines
    row = {"train_loss": 0.5, "test_loss": 0.4, "test_error": 12.5, "images_per_second": 99.0}
    for epoch in (3, 4):
        report = AllocationReport(epoch, AllocationPlan())
        display.epoch_done({"epoch": epoch, **row, "moved": 7, "closed": 8}, report)
    first, head, *lines = screen.getvalue().splitlines()
    assert first == "resumed at epoch 3"
    assert head.startswith("epoch")
    assert len(lines) == 2


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_help_ends_with_examples_and_shows_each_default_once(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    said = capsys.readouterr().out
    assert said.rstrip().endswith(show_examples(verb))
    for action in build_parser(verb)._actions:
        assert (action.help or "").count("default") <= 1, action.dest
        assert "%(default)" not in (action.help or "")


def test_the_settings_that_people_change_first_come_first():
    placed = [name for names in sections().values() for name in names]
    assert sorted(placed) == sorted(setting_names())  # each once, also those that are new
    assert placed[:6] == ["model", "data", "method", "epochs", "gamma", "seed"]


def test_alone_it_says_what_to_begin_with(capsys):
    assert main([]) == 2
    said = capsys.readouterr()
    assert "selectconv train --data digits" in said.out
    assert len(said.err.strip().splitlines()) == 1


def test_what_comes_next_leaves_out_what_needs_test_images():
    words = next_commands("runs/a", is_tested=True)
    assert [line.split()[1] for line in words.splitlines()[1:]] == [
        "eval",
        "report",
        "compress",
        "export",
    ]
    assert "runs/a" in words
    assert "eval" not in next_commands("runs/a", is_tested=False)


def test_a_warning_of_ours_is_one_line(capsys):
    shown = []
    show_warning(
        sc.SelectConvWarning("closed\nlittle"),
        sc.SelectConvWarning,
        "f.py",
        3,
        otherwise=shown.append,
    )
    assert capsys.readouterr().err == "selectconv: warning: closed little\n"
    show_warning("other", UserWarning, otherwise=lambda *what: shown.append(what))
    assert shown == [("other", UserWarning)]
