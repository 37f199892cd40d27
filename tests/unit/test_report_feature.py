"""The figures of feature maps: any number of test images."""

import pytest

from fake_runs import write_run
from selectconv.report.figures.feature import draw_pair, draw_top
from selectconv.report.runs.collect import read_run
from selectconv.report.runs.trained import load_trained

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
