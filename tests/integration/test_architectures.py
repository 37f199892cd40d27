"""Networks of timm and torchvision: converted, re-allocated, trained, moved and compressed."""

import copy

import pytest
import torch
from torch import nn

import selectconv as sc
from architectures import ARCHITECTURES, timm_network
from scrambled import assert_compresses_the_same, scramble
from tiny_models import outputs, select_layers, silence, train

IMAGES = 4  # with two, batch norm on maps of 1x1 knows only -1 and 1
# A conv may sum in another order once its input was copied; what is claimed is rtol 1e-5.
RTOL = 1e-5
# Of the eligible convs; of the silent slots; of the range of the outputs.
SELECTIVE, REALLOCATED, CHANGED = 0.8, 0.85, 0.02
# Deep maps have 8 values a channel here: far from normal, yet 0.97 was the lowest. Channels in
# another order would have none.
CORRELATION = 0.95


def eligible(model, x):
    """Names of the convs that the contract calls eligible, found anew with hooks."""
    larger = set()

    def watch(conv, inputs):
        if max(inputs[0].shape[2:]) > 1 and inputs[0].data_ptr() != x.data_ptr():
            larger.add(conv)

    convs = {name: m for name, m in model.named_modules() if type(m) is nn.Conv2d}
    handles = [conv.register_forward_pre_hook(watch) for conv in convs.values()]
    outputs(model, x)
    for handle in handles:
        handle.remove()
    return {
        name
        for name, conv in convs.items()
        if conv in larger and conv.in_channels >= 8 and conv.groups != conv.in_channels
    }


def assert_closed_forms_follow_the_inputs(model, x):
    """Compare them with the means of real inputs, after norms that tell channels apart."""
    layers = {
        name: layer
        for name, layer in select_layers(model).items()
        if not isinstance(layer.mean_source, sc.ObservedMean)
    }
    for bn in model.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(bn.weight, 0.5, 1.5)
            nn.init.uniform_(bn.bias, -1, 1)
    seen = {}
    for layer in layers.values():
        layer.register_forward_pre_hook(lambda own, inputs: seen.update({own: inputs[0].detach()}))
    model.train()(x)
    for name, layer in layers.items():
        means = torch.stack([seen[layer].mean((0, 2, 3)), layer.input_mean()])
        assert torch.corrcoef(means)[0, 1] > CORRELATION, name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name):
    architecture = ARCHITECTURES[name]
    model, shape = architecture.create(), {"count": IMAGES, "size": architecture.side}
    x = torch.randn(IMAGES, 3, architecture.side, architecture.side)
    plain, wanted = outputs(model, x), eligible(model, x)

    assert sc.convert(model, x) is model
    torch.testing.assert_close(outputs(model, x), plain, rtol=RTOL, atol=1e-7)
    layers = select_layers(model)
    assert len(wanted & set(layers)) >= SELECTIVE * len(wanted) > 0
    rows = sc.describe(model)
    assert {row.name for row in rows if row.skipped is None} == set(layers)

    optimizer = torch.optim.SGD(sc.param_groups(model), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    # No cap on copies: with 32 of them three sources serve 99 slots, and a fifth may be more.
    allocator = sc.ChannelAllocator(model, optimizer, total_epochs=10, gamma=1e-5, max_copies=None)
    silence(model, 1 / 5)
    train(model, optimizer, 2, **shape)
    silent = silence(model, 1 / 5)  # they have learned a little
    before = outputs(model, x)
    moved = allocator.step(0).reallocated
    count = sum(map(len, silent.values()))
    again = sum(len(set(moved.get(key, [])) & set(silent[key])) for key in layers)
    assert again >= REALLOCATED * count
    change = (outputs(model, x) - before).abs().max()
    assert change < CHANGED * (before.max() - before.min())

    copies = copy.deepcopy(model), sc.convert(architecture.create(), x)
    copies[1].load_state_dict(model.state_dict())
    for clone in copies:
        assert torch.equal(outputs(clone, x), outputs(model, x))
        own = {id(module) for module in clone.modules()}
        for layer in select_layers(clone).values():
            assert {id(bn) for bn in layer.mean_source.batch_norms()} <= own

    assert torch.tensor(train(model, optimizer, 1, **shape)).isfinite()
    assert not torch.equal(outputs(model, x), outputs(copies[0], x))
    assert all(layer.weight.isfinite().all() for layer in layers.values())
    assert all(layer.gate.sum() >= 1 for layer in layers.values())
    assert_closed_forms_follow_the_inputs(sc.convert(architecture.create(), x), x)


# More of timm: soak/architectures.py.
QUICK = ("depthwise, hard swish", "shuffle")
SLOW = [name for name in ARCHITECTURES if name not in QUICK]


@pytest.mark.filterwarnings("ignore:.*depends on shapes:selectconv.SelectConvWarning")
@pytest.mark.parametrize(
    "architecture",
    [
        *(pytest.param(ARCHITECTURES[name], id=name) for name in QUICK),
        # Its Conv2dSame depends on shapes.
        pytest.param(timm_network("tf_mobilenetv3_small_minimal_100", 64), id="minimal"),
        *(pytest.param(ARCHITECTURES[name], id=name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_compressed(architecture):
    model, x = architecture.create().eval(), torch.randn(1, 3, architecture.side, architecture.side)
    sc.convert(model, x, realloc="pointwise")
    assert_compresses_the_same(scramble(model, closed=0.4, moved=0.2), x)
