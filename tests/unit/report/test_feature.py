"""The figures of feature maps: any number of test images."""

import pytest
from torch import nn

from fake_runs import write_run
from selectconv.lab.report.figures.feature import draw_pair, draw_top
from selectconv.lab.report.figures.input import middle_layer
from selectconv.lab.report.runs.collect import read_run
from selectconv.lab.report.runs.trained import load_trained

pytest.importorskip("matplotlib", reason="the figures need selectconv[train]")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.mark.parametrize("num_images", [1, 2])
def test_few_images_are_drawn(tmp_path, num_images):
    run = read_run(
        write_run(tmp_path / "run", method="select", test_subset=num_images, weights=True)
    )
    trained = load_trained(run, 512)
    assert len(trained.images) == num_images
    for draw in (draw_pair, draw_top):
        figure = draw(run, trained, "maps")
        assert not figure.problem
        assert "<svg" in figure.body


def test_only_a_conv_after_a_norm_of_that_name_shows_its_input():
    def network(norm):
        block = nn.ModuleDict({norm: nn.BatchNorm2d(3), "conv": nn.Conv2d(3, 4, 1)})
        return nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleList([block])])})

    assert middle_layer(network("norm")) == "blocks.0.0.conv"
    assert middle_layer(network("bn")) is None
