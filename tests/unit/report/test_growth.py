"""The picture of what growth by gradient chose from."""

import json
from pathlib import Path

import pytest
import torch

from fake_runs import write_run
from selectconv.allocate.report import AllocationReport
from selectconv.core.plan import AllocationPlan, LayerPlan
from selectconv.lab.report.figures.growth import draw_gains
from selectconv.lab.report.runs.collect import read_run


def _plan(axes: int) -> AllocationPlan:
    torch.manual_seed(0)
    small = LayerPlan(closed=torch.tensor([1]), gains=torch.randn(1, 4, 3**axes))
    large = LayerPlan(
        closed=torch.tensor([0, 2]),
        opened=torch.tensor([0, 2]),
        source=torch.tensor([3, 1]),
        shift=torch.tensor([[-1.0] * axes, [0.0] * axes]),
        gains=torch.randn(2, 6, 3**axes),
    )
    return AllocationPlan({"blocks.0.0.pointwise.conv": small, "blocks.0.1.pointwise.conv": large})


def test_report_gives_gains_as_plain_numbers() -> None:
    plan = _plan(2)
    gains = AllocationReport(3, plan).gains()
    assert json.loads(json.dumps(gains)) == gains
    one = gains["blocks.0.1.pointwise.conv"]
    assert one["opened"] == [[0, 3, [-1.0, -1.0]], [2, 1, [0.0, 0.0]]]
    wanted = plan.layers["blocks.0.1.pointwise.conv"].gains
    torch.testing.assert_close(torch.tensor(one["gains"]), wanted, atol=1e-4, rtol=1e-3)
    assert AllocationReport(3, AllocationPlan({"conv": LayerPlan()})).gains() == {}


@pytest.mark.parametrize("axes", [1, 2])
def test_layer_that_reopened_most_is_drawn(tmp_path: Path, axes: int) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert draw_gains(run, "gains") is None
    layers = AllocationReport(3, _plan(axes)).gains()
    (run.path / "gains.json").write_text(json.dumps({"epoch": 3, "layers": layers}))
    figure = draw_gains(run, "gains")
    assert figure is not None
    assert "block 1, unit 2, pointwise at epoch 3" in figure.caption
    assert figure.body.startswith("<svg ")
