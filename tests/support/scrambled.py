"""Selective models with an allocation drawn at random, and the comparison that compression owes."""

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

import selectconv as sc
from selectconv.core.layer import SelectConvNd
from selectconv.core.plan import LayerPlan
from soak.networks import outputs
from tiny_models import CLASSES, conv_net


def scramble(model: nn.Module, *, closed: float = 0.4, moved: float = 0.3, seed: int = 0):
    """Close a part of every layer's slots, and re-open a part of those: some with, some without a
    shift, some by whole pixels, some far. Batch norms get statistics of their own."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*size):
        return torch.rand(size, generator=generator)

    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and layer.affine:
            with torch.no_grad():
                layer.weight.copy_(rand(layer.num_features) + 0.5)
                layer.bias.copy_(rand(layer.num_features) - 0.5)
                layer.running_mean.copy_(rand(layer.num_features) - 0.5)
                layer.running_var.copy_(rand(layer.num_features) + 0.5)
        if not isinstance(layer, SelectConvNd):
            continue
        order = torch.randperm(layer.in_channels, generator=generator)
        layer.close(order[: round(closed * layer.in_channels)])
        opened = order[: round(moved * layer.in_channels)]
        if layer.shift is None or not len(opened):
            continue
        layer.close(opened)
        shift = (rand(len(opened), layer.shift.shape[1]) - 0.5) * 5
        shift[::4] = shift[::4].round()
        source = torch.randint(layer.in_channels, (len(opened),), generator=generator)
        layer.apply_plan(LayerPlan(opened=opened, source=source, shift=shift, weight_seed=seed))
        layer.shifted[opened[1::3]] = False
    return model.eval()


def assert_compresses_the_same(model: nn.Module, x: torch.Tensor, **options) -> nn.Module:
    """Compress; same outputs, also for other batches; and it costs what `count` says."""
    before = copy.deepcopy(model.state_dict())
    small = sc.compress(model, x, **options)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(isinstance(module, SelectConvNd) for module in small.modules())
    assert not any(value.is_meta for value in small.state_dict().values())
    with torch.no_grad():
        for batch in (x, torch.cat([x, -x, 2 * x])):
            for want, got in zip(outputs(model, batch), outputs(small, batch), strict=True):
                scale = want.abs().max()
                torch.testing.assert_close(got, want, rtol=1e-4, atol=float(1e-4 * scale))
                assert not want.isnan().any()
        with FlopCounterMode(display=False) as counter:
            small(x)
    if not options:
        cost = sc.count(model, x)
        assert cost.params == sum(value.numel() for value in small.parameters())
        assert cost.macs == counter.get_total_flops() // 2
    own = {value.data_ptr() for value in model.parameters()}
    assert not any(value.data_ptr() in own for value in small.parameters())
    return small


class Magnified(nn.Module):
    """A scrambled network whose outputs are nearly nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.net = scramble(conv_net()).eval()
        self.tail = nn.Linear(CLASSES, CLASSES, bias=False)

    def forward(self, x):
        x = self.net(x)
        return self.tail(x) - self.tail(3 * x) / 3 * (1 + 1e-6)
