"""The comparison with PIL: both sides do the same, and the figures fit together."""

import pytest
import torch

from selectconv.lab.bench import data as bench
from selectconv.lab.bench.data import bench_data

pytest.importorskip("PIL", reason="the comparison is with Pillow (the train extra)")

# The target on idle cores is 20; a suite that shares its cores can promise less.
BUSY = 5


def test_the_figures_fit_together():
    torch.set_num_threads(2)
    result = bench_data(num_images=2000, batch_size=64, repeats=3)
    assert torch.get_num_threads() == 2
    assert result.ratio_min <= result.ratio <= result.ratio_max
    rough = result.images_per_second / result.pil_images_per_second
    assert result.ratio_min * 0.5 <= rough <= result.ratio_max * 2
    assert result.ratio > BUSY
    assert (result.repeats, result.batch_size) == (3, 64)


def test_sides_that_differ_are_not_compared(monkeypatch):
    real = bench.draw_epoch
    monkeypatch.setattr(bench, "draw_epoch", lambda *a, **k: real(*a, **{**k, "seed": 99}))
    with pytest.raises(AssertionError, match="the sides differ by"):
        bench_data(num_images=256, batch_size=64, repeats=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "`repeats` must be at least 1, got 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"num_images": 100, "batch_size": 64}, "`num_images` must be at least 128, got 100"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bench_data(**options)
