"""`--data imagefolder:DIR` as a user types it: train, eval, resume, compress, report, data."""

import functools
import json
import shutil

import numpy as np
import pytest
import yaml

from said import complaint
from selectconv.__main__ import main
from selectconv.lab.train import network
from selectconv.lab.train.run_folder import RunFolder
from selectconv.lab.zoo import create_model

pytest.importorskip("PIL", reason="decoding needs Pillow (the train extra)")

SMALL = ["--batch-size", "8", "--epochs", "2", "--gamma", "0.2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _narrow_network(monkeypatch):
    narrow = functools.partial(create_model, growth_rate=4, units=(1, 1, 1))
    monkeypatch.setattr(network, "create_model", narrow)


@pytest.fixture
def pets(tmp_path):
    """Two classes that differ in brightness."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 6)):
        for name, low in (("cat", 0), ("dog", 128)):
            for number in range(count):
                path = tmp_path / "pets" / part / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = draw.integers(low, low + 128, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path)
    return tmp_path / "pets"


def train(pets, out, *more):
    return main(["train", "--data", f"imagefolder:{pets}", *SMALL, "--out", str(out), *more])


@pytest.mark.parametrize("place", ["train/bee", "test/bee"])
def test_classes_that_do_not_fit_are_the_users_to_change(place, pets, tmp_path, capsys):
    (pets / place).mkdir()
    assert train(pets, tmp_path / "run") == 2
    assert "bee" in complaint(capsys)
    assert not (tmp_path / "run").exists()


def test_a_run_on_own_images_from_training_to_the_compressed_network(pets, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(pets, run, "--holdout") == 0
    said, err = capsys.readouterr()
    assert err == ""
    assert "24 training and 12 test images, 3x12x12" in said
    rows = RunFolder(run).read("metrics.jsonl")
    assert rows[-1]["test_error"] is not None
    assert json.loads((run / "holdout.json").read_text())["images"] == 12
    assert json.loads((run / "images.json").read_text())["classes"] == ["cat", "dog"]

    assert main(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_error"] == pytest.approx(
        rows[-1]["test_error"]
    )
    report = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(report)]) == 0
    assert "imagefolder:" in report.read_text()
    assert "Not drawn" not in report.read_text()
    capsys.readouterr()

    shutil.rmtree(pets)  # the trained network is still of use
    assert main(["compress", str(run)]) == 0
    assert (run / "compressed.safetensors").exists()
    assert main(["report", str(run), "--out", str(report)]) == 0
    capsys.readouterr()
    assert main(["eval", str(run)]) == 2
    assert "there is no folder" in complaint(capsys)


def test_without_test_images_it_trains_and_says_what_it_cannot_do(pets, tmp_path, capsys):
    shutil.rmtree(pets / "test")
    run = tmp_path / "run"
    assert train(pets, run) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no test images: no error is measured" in said
    assert "no test images at the last epoch" in said
    rows = RunFolder(run).read("metrics.jsonl")
    assert [row["test_error"] for row in rows] == [None, None]
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert not (run / "best.safetensors").exists()

    for words in (["eval", str(run)], ["eval", str(run), "--holdout"]):
        assert main(words) == 2
        assert "needs test images" in complaint(capsys)
    assert main(["compress", str(run), "--best"]) == 2
    assert "a run without test images has no best epoch" in complaint(capsys)
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 2
    assert "no test images, so there is no error to report" in complaint(capsys)
    assert train(pets, tmp_path / "other", "--holdout") == 2
    assert "`holdout` needs test images" in complaint(capsys)
    assert not (tmp_path / "other").exists()


def test_neither_training_nor_testing_goes_on_with_other_images(pets, tmp_path, capsys):
    run, extra = tmp_path / "run", pets / "train" / "dog" / "99.png"
    assert train(pets, run, "--subset", "16") == 0
    RunFolder(run).set_status("interrupted")
    assert main(["eval", str(run), "--holdout"]) == 0
    shutil.copy(pets / "train" / "dog" / "0.png", extra)
    capsys.readouterr()
    for words in (["train", "--resume", "--out", str(run)], ["eval", str(run), "--holdout"]):
        assert main(words) == 2
        assert "other images" in complaint(capsys)
    assert RunFolder(run).status() == "interrupted"
    assert main(["eval", str(run)]) == 0
    extra.unlink()
    replaced = pets / "train" / "dog" / "0.png"
    before = replaced.read_bytes()
    shutil.copy(pets / "train" / "cat" / "0.png", replaced)
    capsys.readouterr()
    assert main(["eval", str(run), "--holdout"]) == 2
    assert "SHA-256" in complaint(capsys)
    replaced.write_bytes(before)
    assert train(pets, run, "--subset", "16", "--resume") == 0
    shutil.copytree(pets / "train" / "dog", pets / "train" / "owl")
    capsys.readouterr()
    assert main(["eval", str(run)]) == 2
    assert "the run's: ('cat', 'dog')" in complaint(capsys)


def test_a_broken_file_is_named_and_leaves_no_folder_that_blocks_the_next_try(
    pets, tmp_path, capsys
):
    broken = pets / "train" / "dog" / "3.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:60])
    assert train(pets, tmp_path / "run") == 1
    assert "dog/3.png cannot be decoded" in complaint(capsys)
    broken.write_bytes(whole)
    assert train(pets, tmp_path / "run") == 0


def test_data_lists_own_images(pets, capsys):
    assert main(["data", "list", f"imagefolder:{pets}"]) == 0
    said = capsys.readouterr().out
    assert "3x12x12" in said
    assert "24" in said
    assert main(["data", "fetch", "imagefolder:pets", "--root", str(pets.parent)]) == 0
    assert str(pets) in capsys.readouterr().out


def test_the_run_is_named_after_the_folder(pets, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--data", "imagefolder:pets/", *SMALL]) == 0
    run = tmp_path / "runs" / "densenet40-pets-select-0"
    assert yaml.safe_load((run / "config.yaml").read_text())["data"] == "imagefolder:pets/"
    monkeypatch.chdir("/")
    capsys.readouterr()
    assert main(["eval", str(run), "--data-root", str(tmp_path)]) == 0
