"""Properties of the layers for drawn shapes, groups and allocations (STYLE.md, items 3 and 4)."""

import copy
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import selectconv as sc
from oracles_allocation import count_readers, naive_select

# float64; sums of at most some hundred products, taken in another order.
EXACT = {"rtol": 1e-10, "atol": 1e-10}
# nECDM in float64: columns that sum to 1 to the last bits.
ROUNDING = 1e-12
SELECT = {1: sc.SelectConv1d, 2: sc.SelectConv2d, 3: sc.SelectConv3d}
PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@dataclass
class Case:
    """A layer with some slots closed and some re-allocated, and an input for it."""

    layer: nn.Module
    plain: nn.Module  # torch's conv with the same parameters
    x: torch.Tensor


@st.composite
def cases(draw):
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    slots, outputs = groups * draw(st.integers(1, 5)), groups * draw(st.integers(1, 3))
    arguments = {
        "kernel_size": draw(st.integers(1, 3)),
        "stride": draw(st.integers(1, 2)),
        "padding": draw(st.integers(0, 1)),
        "dilation": draw(st.integers(1, 2)),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "replicate", "circular"])),
        "dtype": torch.float64,
    }
    reach = arguments["dilation"] * (arguments["kernel_size"] - 1) + 1
    size = [draw(st.integers(max(1, reach - 2 * arguments["padding"]), 6)) for _ in range(dims)]
    torch.manual_seed(draw(st.integers(0, 2**31)))
    layer = SELECT[dims](slots, outputs, **arguments)
    plain = PLAIN[dims](slots, outputs, **arguments)
    plain.weight, plain.bias = layer.weight, layer.bias

    bn = nn.BatchNorm1d(slots, dtype=torch.float64)
    nn.init.normal_(bn.weight)
    nn.init.normal_(bn.bias)
    act = draw(st.sampled_from([torch.relu, None]))
    layer.mean_source = sc.BatchNormMean(bn, act)

    exactly = {"min_size": slots, "max_size": slots}
    layer.gate.copy_(torch.tensor(draw(st.lists(st.booleans(), **exactly))))
    moved = torch.tensor(draw(st.lists(st.booleans(), **exactly)))
    layer.moved.copy_(moved)
    layer.index.copy_(torch.where(moved, torch.randint(slots, (slots,)), layer.index))
    layer.shifted.copy_(moved & torch.tensor(draw(st.lists(st.booleans(), **exactly))))
    layer.shift.detach().copy_(torch.randn(slots, dims) * draw(st.sampled_from([0.5, 3.0])))
    return Case(layer, plain, torch.randn(2, slots, *size, dtype=torch.float64))


@given(cases(), st.booleans())
def test_forward_is_the_conv_of_the_naive_select_channel(case, training):
    layer = case.layer.train(training)
    selected = naive_select(case.x, layer.gate, layer.index, layer.shift, layer.shifted)
    torch.testing.assert_close(layer.select(case.x), selected, **EXACT)
    torch.testing.assert_close(layer(case.x), case.plain(selected), **EXACT)


fractions = st.sampled_from([0.0, 1e-3, 1.0]) | st.floats(0, 1)
damages = st.sampled_from(["auto", "mean", "rms"])


@given(cases(), fractions, fractions, damages)
def test_dealloc_stays_within_gamma_and_grows_with_it(case, one, other, damage):
    less, more = sorted((one, other))
    layer = case.layer
    necdm, was_open = layer.ecdm(normalized=True, damage=damage), layer.gate.clone()
    wider = copy.deepcopy(layer)
    closed = layer.dealloc(less, damage=damage)
    assert set(closed.tolist()) <= set(wider.dealloc(more, damage=damage).tolist())
    assert float(necdm[closed].sum(dim=0).max()) <= less + ROUNDING
    # Exactly these were closed, all had been open, and no group lost its last slot.
    assert torch.equal(layer.gate, was_open.index_fill(0, closed, False))
    assert bool(was_open[closed].all())
    groups = layer.gate.view(layer.groups, -1).any(dim=1)
    assert torch.equal(groups, was_open.view(layer.groups, -1).any(dim=1))
    assert not layer.ecdm(damage=damage)[~layer.gate].any()


@given(cases(), st.integers(1, 4), st.none() | st.integers(1, 4), damages, st.integers(0, 2**31))
def test_realloc_keeps_the_function_and_its_word(case, top_k, max_copies, damage, seed):
    layer, twin = case.layer, copy.deepcopy(case.layer)
    before = layer(case.x)
    parameters = {name: id(value) for name, value in layer.named_parameters()}
    index, gate = layer.index.tolist(), layer.gate.tolist()
    necdm = layer.ecdm(normalized=True, damage=damage)
    random_state = torch.get_rng_state()

    arguments = {"top_k": top_k, "max_copies": max_copies, "damage": damage}
    opened = layer.realloc(**arguments, generator=torch.Generator().manual_seed(seed)).tolist()

    torch.testing.assert_close(layer(case.x), before, **EXACT)
    # No parameter was added or replaced.
    assert {name: id(value) for name, value in layer.named_parameters()} == parameters
    # Only closed slots were opened, and they read what open slots that matter had read.
    now_index, now_gate = layer.index.tolist(), layer.gate.tolist()
    matters = {index[slot] for slot in range(len(gate)) if gate[slot] and necdm[slot].any()}
    for slot in range(len(gate)):
        assert now_gate[slot] == (gate[slot] or slot in opened)
        if slot in opened:
            assert not gate[slot]
            assert now_index[slot] in matters
        else:
            assert now_index[slot] == index[slot]
    for channel in set(now_index) if max_copies is not None else ():
        crowd = count_readers(index, gate, channel)
        assert count_readers(now_index, now_gate, channel) <= max(max_copies + 1, crowd)
    # The generator decides all of it, and the global one is left alone.
    assert torch.equal(torch.get_rng_state(), random_state)
    twin.realloc(**arguments, generator=torch.Generator().manual_seed(seed))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])
