"""`selectconv train` and `eval` as a user types them: folders, refusals, exit codes."""

import errno
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import yaml

from said import complaint
from selectconv.__main__ import main
from selectconv.errors import DataError
from selectconv.lab.cli.main import build_parser
from selectconv.lab.cli.train import read_settings
from selectconv.lab.train import loop, network, run_folder
from selectconv.lab.zoo import create_model

SMALL = ["--data", "digits", "--subset", "64", "--test-subset", "40", "--batch-size", "32"]
SMALL += ["--epochs", "2", "--gamma", "0.2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _narrow_network(monkeypatch):
    narrow = functools.partial(create_model, growth_rate=4, units=(1, 1, 1))
    monkeypatch.setattr(network, "create_model", narrow)


@pytest.fixture
def finished(tmp_path, capsys):
    assert main(["train", *SMALL, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    return tmp_path / "run"


def test_a_run_folder_has_everything(finished):
    names = {entry.name for entry in finished.iterdir()}
    assert names == {
        "config.yaml", "env.json", "status.json", "metrics.jsonl", "allocation.jsonl", "last.ckpt",
        "previous.ckpt", "best.safetensors", "last.safetensors", "manifest.json", "tensorboard",
        ".lock",
    }  # fmt: skip
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert (config["gamma"], config["seed"], config["max_copies"]) == (0.2, 0, "none")
    assert json.loads((finished / "status.json").read_text()) == {"status": "done"}
    assert json.loads((finished / "env.json").read_text())["versions"]["torch"] == torch.__version__
    rows = run_folder.RunFolder(finished).read("metrics.jsonl")
    assert [list(row) for row in rows] == 2 * [
        ["epoch", "train_loss", "test_loss", "test_error", "lr", "seconds", "images_per_second",
         "moved", "closed"]
    ]  # fmt: skip
    assert rows[0]["moved"] + rows[0]["closed"] > 0
    (step, *_) = run_folder.RunFolder(finished).read("allocation.jsonl")
    assert all(set(layer) == {"closed", "opened"} for layer in step["layers"].values())
    assert any((finished / "tensorboard").iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_device_that_is_not_there_is_refused(more, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    out = tmp_path / "run"
    for device in ("cuda", "mps"):
        words = [*SMALL[:-1], device, *more, "--out", str(out)]
        assert main(["train", *words]) == 2
        said = f"`device` '{device}' is not on this machine; accepted here are auto, cpu."
        assert said in complaint(capsys)
    assert main(["train", *SMALL, "--precision", "16-mixed", *more, "--out", str(out)]) == 2
    assert "accepted on a CPU are 32-true and bf16-mixed" in complaint(capsys)
    assert not out.exists()


def test_eval_tests_here_what_was_trained_on_another_device(finished, capsys, monkeypatch):
    config = yaml.safe_load((finished / "config.yaml").read_text())
    away = "mps" if torch.cuda.is_available() else "cuda"
    run_folder.RunFolder(finished).start({**config, "device": away})
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert main(["eval", str(finished)]) == 0


def test_flags_win_wherever_the_config_file_stands_and_later_files_win(tmp_path, capsys):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("data: digits\ngamma: 1\nepochs: 7\nseed: 5\nsubset: null\nlr: 1e-3\n")
    second.write_text("epochs: 9\n")
    words = ["--seed", "4", "--config", str(first), "--config", str(second)]
    given = read_settings(build_parser("train").read(words))
    assert given == {"data": "digits", "gamma": 1.0, "epochs": 9, "seed": 4, "lr": 0.001}
    assert type(given["gamma"]) is float  # as in a run's own config.yaml


def test_dry_run_says_what_it_would_do_and_writes_nothing(tmp_path, capsys):
    assert main(["train", *SMALL, "--out", str(tmp_path / "run"), "--dry-run"]) == 0
    assert re.search(r"(?s)densenet40.* about ", capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "densenet4"], "Did you mean 'densenet40'"),
        (["--data", "cifar-10"], "Did you mean 'cifar10'"),
        (["--method", "selct"], "Did you mean 'select'"),
        (["--epochs", "many"], "`epochs` must be an integer of at least 1, got 'many'"),
        (["--epochs", "0"], "`epochs` must be at least 1, got 0"),
        (["--gamma", "2"], r"`gamma` must be a number in \[0, 1\] or 'auto', got 2"),
        (["--max-copies", "some"], "`max_copies`"),
        (["--batchsize", "3"], "Did you mean '--batch-size'"),
        (["--subset", "9999"], "`subset` must be at most"),
        (["--resume", "--out", "nowhere"], "nowhere is not a run: there is no such folder"),
        (["--resume", "--overwrite"], "cannot be combined"),
        (["--config", "missing.yaml"], "missing.yaml cannot be read: No such file"),
        (["--seed"], "--seed: expected one argument"),
        (["--batch", "3"], "got '--batch'. Did you mean '--batch-size'"),
        (["--nonsense"], "`flag` must be one of .*--batch-size, .*; got '--nonsense'"),
        (["digits"], "unrecognized arguments: digits; `selectconv train --help`"),
        (["--model-options", "3"], "`model_options` must be a mapping such as .* got 3"),
        (["--data-root", "nowhere"], "`data_root` must be a folder; there is no folder nowhere"),
        (["--data-root", "nowhere", "--dry-run"], "there is no folder nowhere"),
        (["--holdout", "maybe"], "`holdout` must be True or False, got 'maybe'"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = [] if "--resume" in arguments else ["--data", "digits"]
    assert main(["train", *base, *arguments]) == 2
    line = complaint(capsys)
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3\n", "Did you mean 'epochs'"),
        ("epochs: many\n", "'many'"),
        ("lr: [1, 2]\n", "[1, 2]"),
        ("- 1\n- 2\n", "run.yaml"),
        ("", "the file is empty"),
        ("a: b: c\n", "run.yaml"),
    ],
)
def test_a_wrong_config_file_is_refused_also_on_resume(text, message, finished, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(text)
    words = ["train", "--config", str(tmp_path / "run.yaml")]
    for out, flags in (tmp_path / "new", []), (finished, ["--resume"]):
        assert main([*words, *flags, "--out", str(out)]) == 2
        assert message in complaint(capsys)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flags", [[], ["--resume"], ["--overwrite"], ["--dry-run"]])
def test_an_output_that_is_a_file_is_refused(flags, tmp_path, capsys):
    file = tmp_path / "run"
    file.write_text("precious")
    for out in (file, file / "below"):
        assert main(["train", *SMALL, *flags, "--out", str(out)]) == 2
        assert f"{file} is a file" in complaint(capsys)
    assert file.read_text() == "precious"


@pytest.mark.parametrize("name", ["thesis.tex", "model.onnx"])
def test_a_folder_of_somebody_elses_is_refused(name, tmp_path, capsys):
    (tmp_path / name).write_text("precious")
    for flags, said in ([], "not empty"), (["--overwrite"], f"'{name}', which no run wrote"):
        assert main(["train", *SMALL, *flags, "--out", str(tmp_path)]) == 2
        assert said in complaint(capsys)
        assert os.listdir(tmp_path) == [name]


def test_a_run_is_overwritten_with_what_other_verbs_made_of_it_where_asked_to(finished, capsys):
    made = {"compressed.safetensors", "model.onnx", "report.html"}
    for name in made:
        (finished / name).write_text("")
    before = set(os.listdir(finished))
    assert main(["train", *SMALL, "--out", str(finished)]) == 2
    assert "not empty" in complaint(capsys)
    assert set(os.listdir(finished)) == before
    assert main(["train", *SMALL, "--out", str(finished), "--overwrite"]) == 0
    assert set(os.listdir(finished)) == before - made


def test_resume_of_a_finished_run_and_with_other_flags(finished, capsys):
    assert main(["train", "--resume", "--out", str(finished)]) == 0
    assert "already finished" in capsys.readouterr().out
    assert main(["train", "--resume", "--out", str(finished), "--gamma", "0.2"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "--out", str(finished), "--gamma", "0.3"]) == 2
    assert "has gamma 0.2, got 0.3" in complaint(capsys)


def test_a_runs_own_settings_repeat_it(finished, tmp_path):
    again = tmp_path / "again"
    assert main(["train", "--config", str(finished / "config.yaml"), "--out", str(again)]) == 0
    assert (again / "config.yaml").read_text() == (finished / "config.yaml").read_text()
    assert (again / "last.safetensors").read_bytes() == (finished / "last.safetensors").read_bytes()


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, capsys, monkeypatch):
    assert main(["train", *SMALL, "--lr", "1e38", "--out", str(tmp_path / "run")]) == 1
    assert "at epoch 0, step" in complaint(capsys)
    assert run_folder.RunFolder(tmp_path / "run").status() == "failed"


# It imports another module when the run has begun, and is built for the second time.
LATE = """
import contextlib, os
from torch import nn
def small(num_classes, in_channels):
    if os.path.exists("run/config.yaml"):
        with contextlib.suppress(ImportError):
            import slow
    return nn.Sequential(nn.Conv2d(in_channels, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))
"""
SLOW = "import time; open('run/imported', 'w').close(); time.sleep(60)"


@pytest.mark.parametrize(
    ("moment", "number", "code", "words", "status"),
    [
        ("last.ckpt", signal.SIGTERM, 1, "continue with --resume", "failed"),
        ("last.ckpt", signal.SIGINT, 130, "interrupted; continue with --resume", "interrupted"),
        ("imported", signal.SIGTERM, 1, "continue with --resume", "running"),
        ("imported", signal.SIGINT, 130, "interrupted; trainings continue", "running"),
    ],
)
def test_a_run_that_is_told_to_stop_says_how_to_go_on(
    moment, number, code, words, status, tmp_path
):
    out = tmp_path / "run"
    (tmp_path / "late.py").write_text(LATE)
    if moment == "imported":
        (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "selectconv", "train", *SMALL, "--epochs", "5000"]
    process = subprocess.Popen(
        [*command, "--model", "late:small", "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        until = time.monotonic() + 80
        while not (out / moment).exists() and time.monotonic() < until:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)  # a poll of a file that another process writes
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code
    assert said.count("\n") == 1
    assert words in said
    assert run_folder.RunFolder(out).status() == status
    with run_folder.locked(out):  # nothing is left that would keep a resumed run away
        assert run_folder.RunFolder(out).check("last.ckpt").exists() == (moment == "last.ckpt")


def test_holdout_tests_every_image_that_was_not_trained_on(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *SMALL, "--holdout", "--out", str(out)]) == 0
    result = json.loads((out / "holdout.json").read_text())
    assert list(result) == ["images", "error", "loss"]
    assert result["images"] == 1437 + 360 - 64, "all of the data set but the training images"
    capsys.readouterr()
    assert main(["eval", str(out), "--holdout", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"weights": "last.safetensors", **result}
    # Killed after the last epoch: resuming tests, and trains nothing.
    (out / "holdout.json").unlink()
    (out / "status.json").write_text('{"status": "running"}')
    metrics = (out / "metrics.jsonl").read_bytes()
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert json.loads((out / "holdout.json").read_text()) == result
    assert (out / "metrics.jsonl").read_bytes() == metrics


def test_a_network_of_ones_own_from_training_to_onnx(tmp_path, capsys, monkeypatch):
    (tmp_path / "networks.py").write_text(
        "from torch import nn\n"
        "def small(num_classes, in_channels):\n"
        "    return nn.Sequential(nn.Conv2d(in_channels, 16, 3, padding=1), nn.BatchNorm2d(16),\n"
        "        nn.ReLU(), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU(),\n"
        "        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["train", *SMALL, "--model", "networks:small", "--gamma", "0.5"]) == 0
    run = "runs/networks-small-digits-select-0"
    for words in (["eval", run], ["compress", run], ["export", run], ["report", run]):
        assert main(words) == 0, capsys.readouterr().err
    assert {"compressed.safetensors", "model.onnx"} <= set(os.listdir(run))
    sys.modules.pop("networks")


@pytest.mark.parametrize("verb", [["train", *SMALL], ["bench", "step"]])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("unfit:spatial", "`model` 'unfit:spatial' must return a tensor (N, 10)"),
        ("timm:resnt18", "`model`"),
        ("no_such_module:f", "`model`"),
    ],
)
def test_a_network_that_does_not_fit_or_exist_leaves_no_folder(
    verb, model, said, tmp_path, capsys, monkeypatch
):
    (tmp_path / "unfit.py").write_text(
        "from torch import nn\n"
        "def spatial(num_classes, in_channels):\n"
        "    return nn.Conv2d(in_channels, num_classes, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([*verb, "--model", model]) == 2
    assert said in complaint(capsys)
    assert not (tmp_path / "runs").exists()
    sys.modules.pop("unfit", None)


def flip_bit(path, place):
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [1000, 5000, -3000])
def test_a_flipped_bit_in_a_checkpoint_is_refused_and_the_one_before_offered(
    place, finished, capsys
):
    (finished / "status.json").write_text('{"status": "running"}')
    flip_bit(finished / "last.ckpt", place)
    damaged = (finished / "last.ckpt").read_bytes()
    assert main(["train", "--resume", "--out", str(finished)]) == 1
    line = complaint(capsys)
    assert run_folder.RunFolder(finished).status() == "failed"
    assert (finished / "last.ckpt").read_bytes() == damaged, "it is kept"
    assert "last.ckpt is damaged" in line
    assert "previous.ckpt, of the epoch before, is intact: rename it to last.ckpt" in line
    os.replace(finished / "previous.ckpt", finished / "last.ckpt")
    assert main(["train", "--resume", "--out", str(finished)]) == 0
    assert len(run_folder.RunFolder(finished).read("metrics.jsonl")) == 2


@pytest.mark.parametrize(
    ("verb", "name", "code"),
    [
        (["eval"], "last.safetensors", 1),
        (["compress"], "last.safetensors", 1),
        (["export"], "last.safetensors", 1),
        (["train", "--resume", "--out"], "config.yaml", 2),
    ],
)
def test_a_flipped_bit_in_weights_or_settings_is_refused(verb, name, code, finished, capsys):
    flip_bit(finished / name, -20)
    assert main([*verb, str(finished)]) == code
    assert f"{name} is damaged: it is not what the run wrote; restore it" in complaint(capsys)


def test_other_images_are_refused_where_a_run_is_repeated_or_resumed(finished, tmp_path, capsys):
    assert main(["data", "digest", "digits"]) == 0
    name, _, digest = capsys.readouterr().out.split()
    recorded = json.loads((finished / "env.json").read_text())
    assert recorded["data"] == {"name": name.rstrip(":"), "sha256": digest}
    (finished / "status.json").write_text('{"status": "interrupted"}')
    again = ["train", "--config", str(finished / "config.yaml"), "--out", str(tmp_path / "again")]
    resume = ["train", "--resume", "--out", str(finished)]
    for data, code in (({"name": "digits", "sha256": "1f"}, 2), (None, 0)):
        recorded["data"] = data
        changed = {key: value for key, value in recorded.items() if value is not None}
        run_folder.RunFolder(finished).write({"env.json": json.dumps(changed).encode()})
        for arguments in (again, resume):
            assert main(arguments) == code
            said = complaint(capsys) if code else ""
            assert all(word in said for word in (digest, "1f", str(finished)) if code)
        assert not code or not any((tmp_path / "again").glob("[!.]*"))  # nothing is in the way


def test_resume_without_a_checkpoint_says_that_it_starts_over(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert main(["train", *SMALL, "--resume", "--out", str(tmp_path / "run")]) == 0
    assert "no checkpoint yet: starting at epoch 0" in complaint(capsys)


def test_missing_data_leaves_nothing_that_blocks_the_next_try(tmp_path, capsys):
    arguments = ["train", "--data", "cifar10", "--data-root", str(tmp_path), "--epochs", "1"]
    arguments += ["--out", str(tmp_path / "run")]
    for _ in range(2):
        assert main(arguments) == 1
        assert "No cifar10 in" in complaint(capsys)


@pytest.mark.parametrize("best", [False, True])
def test_the_error_of_a_run_is_that_of_its_weights(tmp_path, capsys, best):
    out = tmp_path / "run"
    # A step acts after the only epoch, and changes outputs: the batch is large for its gamma.
    options = [*SMALL, "--epochs", "1", "--stop-at", "1", "--gamma", "0.5"]
    assert main(["train", *options, "--out", str(out)]) == 0
    (row,) = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert row["moved"] > 0
    capsys.readouterr()
    assert main(["eval", str(out), *["--best"] * best, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["test_error"] == pytest.approx(row["test_error"])
    assert found["test_loss"] == pytest.approx(row["test_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a wrong shape"), "the training failed: a wrong shape"),  # not the user's fault
        (DataError("3.png cannot be read just now."), "3.png cannot be read just now."),
        (MemoryError("full"), "MemoryError: full (SELECTCONV_DEBUG=1 shows the traceback)"),
    ],
)
def test_what_fails_in_an_epoch_leaves_what_was_trained(error, said, tmp_path, capsys, monkeypatch):
    run_epoch = loop.Training.run_epoch

    def fail_in_the_second(self, epoch, display):
        if epoch == 1:
            raise error
        return run_epoch(self, epoch, display)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "run_epoch", fail_in_the_second)
        assert main(["train", *SMALL, "--out", str(out)]) == 1
    assert complaint(capsys) == f"selectconv: {said}"
    assert run_folder.RunFolder(out).status() == "failed"
    assert len(run_folder.RunFolder(out).read("metrics.jsonl")) == 1
    run_folder.RunFolder(out).set_status("done")  # that of another run: the metrics tell
    assert main(["train", "--resume", "--out", str(out)]) == 0
    assert len(run_folder.RunFolder(out).read("metrics.jsonl")) == 2


@pytest.mark.parametrize("flags", [[], ["--resume"], ["--overwrite"]])
def test_a_folder_in_use_is_refused_and_its_process_named(flags, finished, capsys):
    (finished / "status.json").write_text('{"status": "running"}')
    before = {*os.listdir(finished), ".lock.txt"}
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from selectconv.lab.train.run_folder import locked\n"
        f"with locked(Path({str(finished)!r})):\n"
        "    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert main(["train", *SMALL, *flags, "--out", str(finished)]) == 2
        assert f"is in use by process {holder.pid} on " in complaint(capsys)
        assert set(os.listdir(finished)) == before
    finally:
        holder.kill()
        holder.communicate()
    # The system has released the lock of the process that was killed.
    assert main(["train", *SMALL, *flags, "--out", str(finished)]) == (0 if flags else 2)


@pytest.mark.parametrize("verb", ["compress", "export", "report"])
@pytest.mark.parametrize("name", ["config.yaml", "last.safetensors", "metrics.jsonl"])
def test_no_verb_overwrites_the_runs_own_files(verb, name, finished, capsys):
    before = (finished / name).read_bytes()
    assert main([verb, str(finished), "--out", str(finished / name)]) == 2
    assert f"{name} belongs to" in capsys.readouterr().err
    assert (finished / name).read_bytes() == before


def test_a_failure_to_write_is_not_the_users_input(finished, tmp_path, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("selectconv.files.os.replace", full)
    assert main(["compress", str(finished), "--out", str(tmp_path / "small")]) == 1
    assert "No space left on device" in complaint(capsys)


def test_a_training_may_run_in_a_thread(tmp_path):
    codes = []
    words = ["train", *SMALL, "--out", str(tmp_path / "run")]
    thread = threading.Thread(target=lambda: codes.append(main(words)))
    thread.start()
    thread.join()
    assert codes == [0]
