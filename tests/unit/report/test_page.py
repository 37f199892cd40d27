"""The page and its figures: what comes from runs is text, and what cannot be drawn is said."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fake_runs import seal, write_run
from selectconv.lab.cli.main import main
from selectconv.lab.report.collect import Collection, collect
from selectconv.lab.report.compare import group_runs
from selectconv.lab.report.figure import render
from selectconv.lab.report.figures import load_trained, middle_layer
from selectconv.lab.report.page import OF_RUN, build_report, draw_group
from selectconv.lab.reproduce.grid import Grid

pytest.importorskip("matplotlib", reason="figures need matplotlib (the train extra)")
OF_WEIGHTS = list(OF_RUN)[2:]
HOSTILE = "</script></title>\"'><script>alert(1)</script>&amp;"


class Reader(HTMLParser):
    """Collects elements and text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)

    def handle_data(self, data):
        self.text += data


def read_page(folder, text):
    grid = Grid("table1", text, text, text, text, ())
    found = Collection(collect([folder]).runs, {folder / "x": text})
    return Reader(build_report(found, grid).page)


def test_text_stays_text(tmp_path):
    write_run(tmp_path / "p", method="plain")
    hostile, plain = read_page(tmp_path, HOSTILE), read_page(tmp_path, "harmless")
    assert hostile.elements == plain.elements
    assert (
        hostile.text.count(HOSTILE) == plain.text.count("harmless") == 6
    )  # title twice, note, scale, test, reason


def test_data_in_a_script_cannot_end_it():
    layers = [{"name": HOSTILE, "states": ["0"], "source": [0]}]
    body = render("slots.html", layers=layers)
    assert Reader(body).elements == Reader(render("slots.html", layers=[])).elements
    [data] = re.findall(r"<script[^>]*>(.*?)</script>", body)
    assert json.loads(data) == {"layers": layers}


def figures_of(folder):
    """Draw the figures of the only comparison in a folder; by title."""
    [group] = group_runs(collect([folder]).runs)
    return {figure.title: figure for figure in draw_group(group, "g")}


def test_methods_are_set_side_by_side_by_seed(tmp_path):
    for name, seed, error in [("plain", 0, 20.0), ("plain", 1, 22.0), ("select", 0, 19.0),
                              ("select", 2, 5.0), ("shift", 0, 18.0)]:  # fmt: skip
        write_run(tmp_path / f"{name}-{seed}", method=name, seed=seed, error=error)
    figures = figures_of(tmp_path)
    costs = figures["Error against deployed multiply-adds"]
    assert 'role="img" aria-label="Error against deployed multiply-adds"' in costs.body
    assert "Error against time" not in figures  # nobody measured it
    assert "plain (seed 0)" in figures["Test loss of the median runs"].body
    assert re.match(r".*\+S shifts \d+ slots, select", figures["Slots that are shifted"].caption)
    assert figures["Where channels were de- and re-allocated"].is_wide
    assert not costs.is_wide
    # The weights were not kept.
    for title in OF_WEIGHTS:
        assert "it needs the run&#39;s last.safetensors" in figures[title].body


def test_times_are_measured_and_drawn_and_figures_are_saved(tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="times are those of ONNX Runtime (the onnx extra)")
    for method in ("plain", "select", "slimming"):
        write_run(tmp_path / "runs" / method, method=method)
    (tmp_path / "runs" / "slimming" / "time.json").write_text('{"value": 9.0}')  # goes
    report = build_report(collect([tmp_path]), time=True)
    times = {run.name: run.time for run in collect([tmp_path]).runs}
    assert times["plain"]["value"] == 1
    assert (times["select"]["over"], times["select"]["threads"]) == ("plain", 1)
    assert not times["slimming"]  # its weights were not kept, and nothing else knows its shape
    [table] = report.tables
    assert [row["time"] for row in table.rows] == ["1.00", f"{times['select']['value']:.2f}", ""]
    where = ["--out", str(tmp_path / "page.html"), "--figures", str(tmp_path / "figures")]
    assert main(["report", str(tmp_path), *where]) == 0
    files = {path.name: path.read_text() for path in (tmp_path / "figures").iterdir()}
    assert files == report.figures
    assert "0-error-against-time.svg" in files
    assert all(ElementTree.fromstring(text).tag.endswith("svg") for text in files.values())


@pytest.mark.parametrize("num_images", [1, 2, 40])
def test_figures_of_the_weights_are_drawn_on_few_images_too(tmp_path, num_images):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    write_run(tmp_path / "run", method="select", test_subset=num_images, weights=True)
    figures = figures_of(tmp_path)
    for title in OF_WEIGHTS:
        assert figures[title].body.startswith("<svg "), figures[title].body
        assert re.search(r"The paper's Figure [4689]", figures[title].caption)
    [run] = collect([tmp_path]).runs
    *_, images, pictures = load_trained(run)
    assert len(images) == len(pictures) == num_images
    # What the network is tested on: pictures, scaled by the data set's mean and deviation.
    assert pictures.dtype == torch.uint8
    assert images.mean().abs() < 0.5


def test_weights_that_cannot_be_drawn_are_said_on_the_page(tmp_path):
    run = write_run(tmp_path / "s", method="select", weights=True)
    weights = load_file(run / "last.safetensors")
    for name, tensor in weights.items():
        if name.endswith(".index"):
            weights[name] = tensor + 1000
    save_file(weights, run / "last.safetensors")
    seal(run)
    figures = figures_of(tmp_path)
    assert all('class="problem"' in figures[title].body for title in OF_WEIGHTS)
    assert "<svg" in figures["Where channels were de- and re-allocated"].body


def test_only_a_conv_after_a_norm_of_that_name_shows_its_input():
    def network(norm):
        block = nn.ModuleDict({norm: nn.BatchNorm2d(3), "conv": nn.Conv2d(3, 4, 1)})
        return nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleList([block])])})

    assert middle_layer(network("norm")) == "blocks.0.0"
    with pytest.raises(ValueError, match="no batch norm"):
        middle_layer(network("bn"))
