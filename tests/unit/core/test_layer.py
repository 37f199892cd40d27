"""The selective layers in one, two and three dimensions: what they compute, close and re-open."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selectconv as sc
from oracles_allocation import naive_scores, naive_select, top_candidates
from oracles_formulas import naive_ecdm, naive_rms_damage
from scrambled import scramble
from selectconv import AllocationError, BatchNormMean, ConstantMean, MeanSourceError, ObservedMean
from selectconv.core.allocation import ReallocRule
from selectconv.core.plan import LayerPlan
from selectconv.core.slots import mask_weight
from tiny_models import assert_same, conv_net, dense_net, images, select_layers, snapshot

# float64, sums of at most some hundred products of order one, taken in another order.
EXACT = {"rtol": 1e-11, "atol": 1e-11}
# float32 nECDM of a handful of slots.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}
# bfloat16 keeps 8 bits: 2^-8 a rounding, of input, weights and result.
BFLOAT16 = {"rtol": 3 * 2**-8, "atol": 0.05}

DIMS = (1, 2, 3)
SELECT = {1: sc.SelectConv1d, 2: sc.SelectConv2d, 3: sc.SelectConv3d}
PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MAPS = {1: (7,), 2: (5, 6), 3: (3, 4, 5)}  # no two sizes alike
NEW_KEYS = {"gate", "index", "moved", "shifted", "shift"}
VARIANTS = {
    "defaults": {},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "same": {"padding": "same"},
    "dilation": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2, "padding": 1},
    "no bias": {"bias": False},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": 1, "padding_mode": "replicate"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "all": {"stride": 2, "groups": 4, "padding": 1, "padding_mode": "circular", "bias": False},
}

in_all_dims = pytest.mark.parametrize("dims", DIMS)
in_all_variants = pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS.keys())


def make_layer(dims=2, kernel_size=3, dtype=torch.float64, **arguments):
    return SELECT[dims](8, 4, kernel_size, dtype=dtype, **arguments)


def make_input(dims=2, batch=2, dtype=torch.float64):
    return torch.randn(batch, 8, *MAPS[dims], dtype=dtype)


def allocate(layer, gate, index, shifted, shift):
    """Write an allocation into the buffers, past the code under test."""
    layer.gate.copy_(torch.tensor(gate, dtype=torch.bool))
    layer.index.copy_(torch.tensor(index))
    layer.shifted.copy_(torch.tensor(shifted, dtype=torch.bool))
    layer.moved.copy_(layer.index != torch.arange(len(index)))
    if layer.shift is not None:
        layer.shift.detach().copy_(shift)


def allocate_mixed(layer):
    """Slots of every kind, and shifts also where none applies: they must not be read.

    0: open, and a source; 1: closed, though its channel is read; 2: moved unshifted; 3: moved and
    shifted; 4: shifted out of the frame; 5: a source, shifted in its own place; 6: shifted, reads
    the channel of a closed slot; 7: moved, then closed.
    """
    shift = torch.randn(8, layer.weight.ndim - 2, generator=torch.Generator().manual_seed(1)) * 1.2
    shift[4] = 40.3
    allocate(
        layer,
        gate=[1, 0, 1, 1, 1, 1, 1, 0],
        index=[0, 1, 0, 0, 5, 5, 1, 3],
        shifted=[0, 0, 0, 1, 1, 1, 1, 1],
        shift=shift,
    )


def convolve_naively(layer, x, dims, **arguments):
    """Conv(SelectChannel(x)) with torch's conv and the naive SelectChannel."""
    plain = PLAIN[dims](8, 4, 3, dtype=layer.weight.dtype, **arguments)
    plain.weight, plain.bias = layer.weight, layer.bias
    return plain(naive_select(x, layer.gate, layer.index, layer.shift, layer.shifted))


def with_batch_norm(layer, act=torch.relu, seed=0):
    """Give a layer a mean source of random batch norm parameters."""
    generator = torch.Generator().manual_seed(seed)
    bn = nn.BatchNorm2d(layer.in_channels)
    with torch.no_grad():
        bn.bias.copy_(torch.randn(layer.in_channels, generator=generator))
        bn.weight.copy_(torch.rand(layer.in_channels, generator=generator) + 0.2)
    layer.mean_source = BatchNormMean(bn, act)
    return layer


def with_necdm(rows, groups=1, **arguments):
    """Make a pointwise layer whose ECDM, for an input of mean 1, is the matrix `rows` (I, O)."""
    rows = torch.tensor(rows)
    slots, outputs = len(rows), rows.shape[1] * groups
    layer = sc.SelectConv2d(slots, outputs, 1, groups=groups, **arguments)
    with torch.no_grad():
        for group in range(groups):
            here = slice(group * slots // groups, (group + 1) * slots // groups)
            to = slice(group * rows.shape[1], (group + 1) * rows.shape[1])
            layer.weight[to] = rows[here].t()[:, :, None, None]
    layer.mean_source = ConstantMean(1.0, slots)
    return layer


# Construction


@in_all_dims
def test_the_constructor_is_torchs_and_reallocate(dims):
    ours, theirs = (
        [(p.name, p.default, p.kind) for p in inspect.signature(kind).parameters.values()]
        for kind in (SELECT[dims], PLAIN[dims])
    )
    assert ours == [*theirs, ("reallocate", True, inspect.Parameter.KEYWORD_ONLY)]


@in_all_dims
@in_all_variants
def test_a_fresh_layer_is_the_plain_conv_to_the_bit(dims, arguments):
    torch.manual_seed(3)
    plain = PLAIN[dims](8, 4, 3, **arguments)
    torch.manual_seed(3)
    layer = SELECT[dims](8, 4, 3, **arguments)
    x = make_input(dims, dtype=torch.float32)
    assert torch.equal(layer(x), plain(x))  # the same initialisation, too
    assert torch.equal(layer.eval()(x), plain(x))
    assert torch.equal(layer(x[0]), plain(x[0]))
    assert torch.equal(layer.select(x), x)


@in_all_dims
def test_a_plain_state_dict_means_a_fresh_allocation(dims):
    plain, layer = nn.Sequential(PLAIN[dims](8, 4, 3)), SELECT[dims](8, 4, 3)
    layer.mean_source = sc.ObservedMean()
    allocate_mixed(layer)
    layer.observed_batches.fill_(4)
    state = plain.state_dict()
    model = nn.Sequential(layer)
    model.load_state_dict(state)  # strict
    assert set(state) == {"0.weight", "0.bias"}  # the caller's own is not written into
    x = make_input(dims, dtype=torch.float32)
    assert torch.equal(model(x), plain(x))
    fresh = SELECT[dims](8, 4, 3)
    assert all(torch.equal(getattr(layer, name), getattr(fresh, name)) for name in NEW_KEYS)
    assert int(layer.observed_batches) == 1  # of the one forward


def test_an_allocation_with_a_key_missing_is_still_refused():
    layer = sc.SelectConv2d(8, 4, 1)
    state = layer.state_dict()
    del state["index"]
    with pytest.raises(RuntimeError, match="index"):
        layer.load_state_dict(state)


@in_all_dims
def test_without_reallocation_there_is_no_shift(dims):
    layer = make_layer(dims, reallocate=False)
    assert layer.shift is None
    assert set(layer.state_dict()) == NEW_KEYS - {"shift"} | {"weight", "bias"}
    layer.close([1, 4])
    for source in (None, ObservedMean(), ConstantMean(1.0, 8)):
        layer.mean_source = source
        opened = layer.realloc()  # needs no mean: there is nothing to decide
        assert (opened.tolist(), opened.dtype) == ([], torch.int64)
    assert layer.gate.tolist() == [True, False, True, True, False, True, True, True]
    x = make_input(dims)
    torch.testing.assert_close(layer(x), convolve_naively(layer, x, dims), **EXACT)


# from_conv


@in_all_dims
@pytest.mark.parametrize("reallocate", [True, False])
def test_from_conv_keeps_the_very_tensors(dims, reallocate):
    conv = PLAIN[dims](8, 4, 3, padding=1, groups=2).eval().requires_grad_(False)
    conv.note = "of the user"
    source = ConstantMean(1.0, 8)
    layer = SELECT[dims].from_conv(conv, reallocate=reallocate, mean=source)
    assert type(layer) is SELECT[dims]
    assert layer.weight is conv.weight
    assert layer.bias is conv.bias
    assert layer.mean_source is source
    assert (layer.training, layer.note) == (False, "of the user")
    assert (layer.shift is None) is not reallocate
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    x = make_input(dims, dtype=torch.float32)
    assert torch.equal(layer(x), conv(x))
    assert set(conv.state_dict()) == {"weight", "bias"}  # the conv itself is left as it was


def test_from_conv_keeps_hooks_and_their_handles():
    conv, calls = nn.Conv2d(8, 4, 1), []
    handles = [
        conv.register_forward_pre_hook(lambda *_: calls.append("before")),
        conv.register_forward_hook(lambda *_: calls.append("after")),
        conv.register_forward_hook(lambda *_, **__: calls.append("kwargs"), with_kwargs=True),
        conv.register_full_backward_hook(lambda *_: calls.append("backward")),
    ]
    layer = sc.SelectConv2d.from_conv(conv)
    x = torch.randn(1, 8, 2, 2, requires_grad=True)
    layer(x).sum().backward()
    assert calls == ["before", "after", "kwargs", "backward"]
    for handle in handles:
        handle.remove()
    layer(x).sum().backward()
    assert len(calls) == 4


def test_from_conv_of_a_compiled_conv_does_not_run_the_old_conv():
    conv = nn.Conv2d(8, 4, 1)
    conv.compile(backend="eager")
    layer = sc.SelectConv2d.from_conv(conv)
    layer.close(range(8))
    assert torch.equal(layer(torch.randn(1, 8, 2, 2))[0, :, 0, 0], conv.bias)


class OtherConv(nn.Conv2d):
    """A subclass that computes something else."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, 2 * weight, bias)


def patched_conv():
    conv = nn.Conv2d(8, 4, 1)
    conv.forward = lambda x: x
    return conv


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OtherConv(8, 4, 1), "what torch.nn.Conv2d does, got OtherConv"),
        (lambda: nn.Conv1d(8, 4, 1), "what torch.nn.Conv2d does, got Conv1d"),
        (lambda: nn.ConvTranspose2d(8, 4, 1), "got ConvTranspose2d"),
        (lambda: sc.SelectConv2d(8, 4, 1), "got SelectConv2d"),
        (lambda: nn.Linear(8, 4), "got Linear"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 4, 1)),
            "got ParametrizedConv2d",
        ),
        (lambda: nn.utils.spectral_norm(nn.Conv2d(8, 4, 1)), "a weight and a forward of its own"),
        (patched_conv, "a weight and a forward of its own"),
    ],
    ids=[
        "subclass",
        "1d",
        "transposed",
        "selective",
        "linear",
        "parametrised",
        "hooked",
        "patched",
    ],
)
def test_from_conv_refuses_what_may_compute_something_else(make, message):
    with pytest.raises(TypeError, match=message):
        sc.SelectConv2d.from_conv(make())


# Forward


@in_all_dims
@in_all_variants
def test_a_mixed_allocation_equals_the_naive_reference(dims, arguments):
    layer = make_layer(dims, **arguments)
    allocate_mixed(layer)
    x = make_input(dims)
    expected = convolve_naively(layer, x, dims, **arguments)
    torch.testing.assert_close(layer(x), expected, **EXACT)
    torch.testing.assert_close(layer.eval()(x), expected, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(layer(x[:1]), expected[:1], **EXACT)
        torch.testing.assert_close(layer(x[0]), expected[0], **EXACT)  # unbatched


@pytest.mark.parametrize("shape", [(2, 7, 5, 5), (8, 5, 5)])
def test_select_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"`x` must have shape \(\*, 8, \*, \*\)"):
        make_layer().select(torch.randn(shape))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("shape", [(2, 7, 5, 6), (2, 12, 5, 6), (12, 5, 6), (2, 2, 8, 5, 6)])
def test_inputs_that_a_conv_refuses_are_refused_in_torchs_words(shape, mixed):
    layer = make_layer()
    if mixed:
        allocate_mixed(layer)
    x = torch.randn(shape, dtype=torch.float64)
    with pytest.raises(RuntimeError) as theirs:
        nn.Conv2d(8, 4, 3).double()(x)
    with pytest.raises(RuntimeError) as ours:
        layer(x)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_in_gives_the_same_values(dims):
    layout = torch.channels_last if dims == 2 else torch.channels_last_3d
    layer = make_layer(dims, padding=1)
    allocate_mixed(layer)
    x = make_input(dims)
    expected = layer(x)
    torch.testing.assert_close(layer(x.to(memory_format=layout)), expected, **EXACT)
    assert layer.select(x.to(memory_format=layout)).is_contiguous(memory_format=layout)
    layer.to(memory_format=layout)
    assert mask_weight(layer).is_contiguous(memory_format=layout)  # or torch would reorder it
    torch.testing.assert_close(layer(x.to(memory_format=layout)), expected, **EXACT)


@in_all_dims
def test_bfloat16(dims):
    layer = make_layer(dims, dtype=torch.float32)
    allocate_mixed(layer)
    layer.to(torch.bfloat16)
    x = make_input(dims, dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()
    out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), convolve_naively(exact, x.double(), dims), **BFLOAT16)


def test_autocast():
    layer = make_layer(dtype=torch.float32)
    allocate_mixed(layer)
    x = make_input(dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        fresh = make_layer(dtype=torch.float32)(x)
    assert out.dtype == fresh.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), convolve_naively(layer, x, 2), **BFLOAT16)
    out.sum().backward()
    assert layer.weight.grad.dtype == layer.shift.grad.dtype == x.grad.dtype == torch.float32


# Gradients


def gradients(out, tensors, weights):
    return torch.autograd.grad((out * weights).sum(), tensors)


@in_all_dims
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_equal_those_of_the_naive_reference(dims, groups):
    arguments = {"padding": 1, "groups": groups}
    layer = make_layer(dims, **arguments)
    allocate_mixed(layer)
    x = make_input(dims).requires_grad_()
    tensors = (x, layer.weight, layer.bias, layer.shift)
    out = layer(x)
    weights = torch.randn_like(out)
    ours = gradients(out, tensors, weights)
    theirs = gradients(convolve_naively(layer, x, dims, **arguments), tensors, weights)
    torch.testing.assert_close(ours, theirs, **EXACT)
    assert bool(ours[3][3].all())  # a slot whose shift matters learns it


ALLOCATIONS = {
    "fresh": lambda layer: None,
    "closed": lambda layer: layer.close([0, 5]),
    "all closed": lambda layer: layer.close(range(8)),
    "copied": lambda layer: allocate(layer, [1] * 8, [0] * 8, [0] * 8, torch.ones(8, 2)),
    "mixed": allocate_mixed,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", ALLOCATIONS.values(), ids=ALLOCATIONS.keys())
def test_every_parameter_gets_a_gradient(change, training):
    layer = make_layer(padding=1).train(training)
    change(layer)
    layer(make_input()).square().sum().backward()
    assert [name for name, value in layer.named_parameters() if value.grad is None] == []
    assert not layer.shift.grad[~(layer.shifted & layer.gate)].any()
    assert not layer.weight.grad[:, ~layer.gate].any()
    assert bool((layer.weight.grad[:, layer.gate & ~layer.shifted] != 0).all())


@pytest.mark.parametrize("frozen", ["weight", "bias", "shift"])
def test_a_frozen_parameter_stays_without_a_gradient(frozen):
    layer = make_layer()
    layer.get_parameter(frozen).requires_grad_(False)
    for change in (ALLOCATIONS["fresh"], allocate_mixed):
        change(layer)
        layer.zero_grad()
        layer(make_input()).sum().backward()
        assert [name for name, p in layer.named_parameters() if p.grad is None] == [frozen]


# torch.compile


@pytest.fixture
def counting_backend():
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import: only here

    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def test_one_compiled_graph_serves_every_allocation(counting_backend):
    layer = make_layer(padding=1)
    layer.mean_source = ObservedMean()
    compiled = torch.compile(layer, fullgraph=True, backend=counting_backend)
    x = make_input().requires_grad_()
    tensors = (x, layer.weight, layer.bias, layer.shift)
    for change in ALLOCATIONS.values():
        change(layer)
        ours, theirs = compiled(x), layer(x)
        weights = torch.randn_like(theirs)
        torch.testing.assert_close(ours, theirs, **EXACT)
        torch.testing.assert_close(
            gradients(ours, tensors, weights), gradients(theirs, tensors, weights), **EXACT
        )
    assert counting_backend.frame_count == 1
    assert int(layer.observed_batches) == 2 * len(ALLOCATIONS)


# Devices


@pytest.mark.parametrize("build", [conv_net, dense_net])
def test_off_the_cpu_nothing_waits_for_a_value(build, monkeypatch):
    """Tensors say that they are elsewhere, and what would make the host wait for them fails."""
    model, (x, labels) = scramble(build()).train(), images()
    next(iter(select_layers(model).values())).mean_source = ObservedMean()
    expected = F.cross_entropy(copy.deepcopy(model)(x), labels)
    optimizer = torch.optim.SGD(sc.param_groups(model), lr=0.1, momentum=0.9)

    def wait(*arguments):
        raise AssertionError("the host waits for a value")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        for way in ("cpu", "item", "nonzero", "numpy", "tolist"):
            patch.setattr(torch.Tensor, way, wait)
        for kind in ("bool", "float", "index", "int"):
            patch.setattr(torch.Tensor, f"__{kind}__", wait)
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(loss, expected)


# Damage


@pytest.mark.parametrize("act", [torch.relu, None, nn.SiLU()], ids=["relu", "none", "silu"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_ecdm_by_loops(groups, act):
    layer = with_batch_norm(make_layer(dtype=torch.float32, groups=groups), act)
    allocate_mixed(layer)
    mean, var = (
        moment[layer.index] * layer.gate
        for moment in (layer.mean_source.mean(), layer.mean_source.var())
    )
    weight = layer.weight.detach()
    by_mean = torch.tensor(naive_ecdm(weight, mean, groups), dtype=torch.float32)
    by_rms = torch.tensor(naive_rms_damage(weight, mean, var, groups), dtype=torch.float32)
    for options, expected in (
        ({}, by_mean),
        ({"damage": "mean"}, by_mean),
        ({"damage": "rms"}, by_rms),
        ({"damage": "auto"}, by_mean if act is torch.relu else by_rms),
        ({"damage": "rms", "normalized": True}, by_rms / by_rms.sum(dim=0)),
    ):
        torch.testing.assert_close(layer.ecdm(**options), expected, **FLOAT32)
    assert not layer.ecdm()[~layer.gate].any()
    assert not layer.ecdm().requires_grad


@pytest.mark.parametrize("call", ["input_mean", "ecdm", "dealloc", "realloc", "smallest_gamma"])
def test_without_a_mean_nothing_is_decided(call):
    layer = make_layer()
    layer.close([0])
    before = snapshot(layer)
    with pytest.raises(MeanSourceError, match="set `mean_source` to a BatchNormMean or an Obs"):
        getattr(layer, call)()
    assert_same(snapshot(layer), before)


EDGE = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("act", "bias", "kernel", "auto"),
    [
        # The input of a ReLU is known not to be negative, so "auto" is the paper's mean.
        pytest.param(nn.ReLU(), 1.0, EDGE, [0], id="edge filter"),
        pytest.param(None, 0.0, torch.ones(3, 3), [], id="zero mean"),
        pytest.param(nn.Tanh(), 0.0, torch.ones(3, 3), [], id="tanh"),
    ],
)
def test_the_mean_is_blind_where_rms_sees(act, bias, kernel, auto):
    """A kernel that sums to zero, or an input of mean zero, does no damage by the mean alone."""
    bn, conv = nn.BatchNorm2d(4), sc.SelectConv2d(4, 1, 3, bias=False)
    with torch.no_grad():
        bn.bias.copy_(torch.tensor([bias, 1.0, 1.0, 1.0]))
        conv.weight.fill_(0.25)
        conv.weight[0, 0] = kernel
    conv.mean_source = BatchNormMean(bn, act)
    assert conv.dealloc(damage="rms").tolist() == []
    assert copy.deepcopy(conv).dealloc().tolist() == auto
    assert conv.dealloc(damage="mean").tolist() == [0]


# Closing


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_smallest_gamma_is_where_dealloc_begins_to_act(groups, seed):
    layer = with_batch_norm(make_layer(dtype=torch.float32, groups=groups), seed=seed)
    layer.close([seed])
    smallest = layer.smallest_gamma()
    below = float(np.nextafter(np.float32(smallest), np.float32(0)))
    assert layer.dealloc(gamma=below).tolist() == []
    assert len(layer.dealloc(gamma=smallest)) >= 1


def test_smallest_gamma_counts_only_slots_that_may_close():
    layer = with_necdm([[0.125], [0.875], [0.25], [0.75]], groups=2)
    assert layer.smallest_gamma() == 0.125
    layer.close([1])  # slot 0 is the last of its group
    assert layer.smallest_gamma() == 0.25
    layer.close([2])
    assert layer.smallest_gamma() is None


@pytest.mark.parametrize(
    ("rows", "groups", "gamma", "closed"),
    [
        pytest.param([[0.5], [0.125], [0.125], [0.25]], 1, 0.25, [1, 2], id="weakest first"),
        pytest.param([[0.5], [0.125], [0.125], [0.25]], 1, 1.0, [1, 2, 3], id="strongest stays"),
        pytest.param([[0.25], [0.25], [0.25], [0.25]], 1, 1.0, [0, 1, 2], id="ties: last stays"),
        pytest.param([[0.0], [0.0], [0.0], [0.0]], 1, 0.0, [0, 1, 2], id="no damage at all"),
        pytest.param([[0.75], [0.25], [0.25], [0.75]], 2, 1.0, [1, 2], id="one of each group"),
        pytest.param([[0.0], [0.0], [0.25], [0.75]], 2, 0.0, [0], id="a group of zeros"),
    ],
)
def test_dealloc_keeps_the_slot_that_algorithm_1_takes_last(rows, groups, gamma, closed):
    layer = with_necdm(rows, groups)
    result = layer.dealloc(gamma=gamma)
    assert (result.tolist(), result.dtype) == (closed, torch.int64)
    assert layer.gate.tolist() == [slot not in closed for slot in range(4)]
    assert layer.dealloc(gamma=0.0).tolist() == []  # what is closed is not closed again


def test_dealloc_changes_the_gate_alone():
    layer = with_batch_norm(make_layer(dtype=torch.float32))
    expected = snapshot(layer)
    expected["model"]["gate"][layer.dealloc(gamma=0.3)] = False
    assert not expected["model"]["gate"].all()
    assert_same(snapshot(layer), expected)


def test_protected_slots_stay_open_and_take_no_share_of_gamma():
    layer = with_necdm([[0.125], [0.125], [0.25], [0.5]])
    protected = torch.tensor([True, False, False, False])
    assert layer.plan(gamma=0.375).closed.tolist() == [0, 1]
    assert layer.plan(gamma=0.375, protected=protected).closed.tolist() == [1, 2]
    assert layer.plan(gamma=1.0, protected=~protected).closed.tolist() == [0]


def test_dealloc_refuses_a_gamma_outside_0_to_1():
    with pytest.raises(ValueError, match=r"`gamma` .*\[0, 1\], got 1.1"):
        with_batch_norm(make_layer()).dealloc(gamma=1.1)


@pytest.mark.parametrize(
    "slots",
    [
        [1, 3],
        (3, 1),
        range(1, 4, 2),
        torch.tensor([1, 3]),
        torch.tensor([[3, 1]]),
        np.array([1, 3]),
        {1, 3},
        {1: "a", 3: "b"}.keys(),
        (slot for slot in (1, 3)),
    ],
    ids=["list", "tuple", "range", "tensor", "matrix", "array", "set", "keys", "generator"],
)
def test_close_takes_any_integers(slots):
    layer = make_layer()
    layer.close(slots)
    layer.close([3])  # closed slots stay closed
    layer.close([])
    assert (~layer.gate).nonzero().flatten().tolist() == [1, 3]
    assert not layer.moved.any()


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ([2, 8], AllocationError, r"`slots` names \[8\]; the layer has 0 to 7"),
        ([-1], AllocationError, r"`slots` names \[-1\]"),
        ([1.0], TypeError, "`slots` must be integers, got torch.float32"),
        (["a"], TypeError, "`slots` must be integers, got"),
        ([1j], TypeError, "`slots` must be integers, got torch.complex64"),
        (torch.ones(8, dtype=torch.bool), TypeError, "`slots` must be integers, got torch.bool"),
        ([True, False], TypeError, "`slots` must be integers, got torch.bool"),
    ],
)
def test_close_refuses_other_slots_and_changes_nothing(slots, error, message):
    layer = make_layer()
    before = snapshot(layer)
    with pytest.raises(error, match=message):
        layer.close(slots)
    assert_same(snapshot(layer), before)


# Re-opening


def closed_layer(dims=2, groups=1, closed=(1, 2, 6), **arguments):
    layer = with_batch_norm(make_layer(dims, groups=groups, padding=1, **arguments))
    layer.close(closed)
    return layer


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_realloc_reads_what_the_top_k_read(norm):
    layer = closed_layer(closed=range(3, 8))
    layer.index.copy_(torch.tensor([6, 1, 5, 3, 4, 5, 6, 7]))  # copies of copies never chain
    necdm = layer.ecdm(normalized=True).tolist()
    scores = naive_scores(necdm, layer.index.tolist(), layer.gate.tolist(), None, norm)
    expected = {int(layer.index[slot]) for slot in top_candidates(scores, 2)}
    seen = set()
    for seed in range(10):
        trial = copy.deepcopy(layer)
        trial.realloc(top_k=2, norm=norm, generator=torch.Generator().manual_seed(seed))
        seen |= set(trial.index[3:].tolist())
    assert seen == expected


def test_realloc_without_shift_copies_as_it_is():
    layer = closed_layer()
    with torch.no_grad():
        layer.shift.fill_(0.7)  # of an earlier life
        layer.shifted.fill_(True)
    opened = layer.realloc(use_shift=False)
    assert not layer.shifted[opened].any()
    assert not layer.shift[opened].any()
    assert layer.moved[opened].all()


@pytest.mark.parametrize("max_shift", [0.0, 0.3, 4.0])
def test_realloc_draws_shifts_up_to_max_shift(max_shift):
    layer = with_batch_norm(sc.SelectConv2d(128, 4, 1))
    layer.close(range(1, 128))
    drawn = layer.shift[layer.realloc(max_shift=max_shift, max_copies=None)].detach()
    assert float(drawn.abs().max()) <= max_shift
    # 127 draws a direction: the outermost of each is within a tenth of the end.
    assert bool((drawn.amin(dim=0) <= -0.9 * max_shift).all())
    assert bool((drawn.amax(dim=0) >= 0.9 * max_shift).all())


# 4096 draws: a standard deviation is known to 1.1 %; five of those.
STD_TOLERANCE = 0.055


@pytest.mark.parametrize("weight_std", [None, 0.3])
def test_random_weights_come_from_the_layers_initialisation(weight_std):
    layer = with_batch_norm(sc.SelectConv2d(16, 128, 2, groups=2))
    layer.weight_std = weight_std
    layer.close(range(8, 16))
    expected = layer(torch.ones(1, 16, 2, 2))
    opened = layer.realloc(init="random")
    drawn = layer.weight.detach()[64:]
    bound = (16 // 2 * 2 * 2) ** -0.5  # torch's own: 1 / sqrt(fan in)
    std = bound / 3**0.5 if weight_std is None else weight_std
    assert opened.tolist() == list(range(8, 16))
    assert float(drawn.std()) == pytest.approx(std, rel=STD_TOLERANCE)
    assert abs(float(drawn.mean())) < STD_TOLERANCE * std
    assert (float(drawn.abs().max()) <= bound) is (weight_std is None)
    assert not torch.allclose(layer(torch.ones(1, 16, 2, 2)), expected)


def test_realloc_of_an_open_layer_draws_nothing():
    layer = with_batch_norm(make_layer())
    before = snapshot(layer)  # the global random numbers, too
    assert layer.realloc().tolist() == []
    assert_same(snapshot(layer), before)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"top_k": 0}, ValueError),
        ({"top_k": 1.5}, TypeError),
        ({"max_copies": 0}, ValueError),
        ({"init": "ones"}, ValueError),
        ({"max_shift": -1}, ValueError),
        ({"max_shift": np.nan}, ValueError),
        ({"max_shift": "1"}, TypeError),
        ({"norm": "l1"}, ValueError),
        ({"generator": 5}, TypeError),
        ({"damage": "max"}, ValueError),
    ],
    ids=str,
)
def test_realloc_refuses_bad_arguments(arguments, error):
    ((name, value),) = arguments.items()
    with pytest.raises(error, match=rf"`{name}` .*got {value!r}"):
        closed_layer().realloc(**arguments)


@pytest.mark.parametrize("call", ["dealloc", "realloc"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["weights", "bias", "scale"])
def test_values_that_are_not_finite_are_refused_and_nothing_changes(where, value, call):
    layer = closed_layer()
    bn = layer.mean_source.bn
    with torch.no_grad():
        {"weights": layer.weight[0, 0, 0], "bias": bn.bias, "scale": bn.weight}[where][0] = value
    before = snapshot(layer)  # the global random numbers, too
    what = "weights" if where == "weights" else "input statistics"
    with pytest.raises(AllocationError, match=f"the layer's {what} hold NaN or infinite values"):
        getattr(layer, call)()
    assert_same(snapshot(layer), before)


# Plans


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"closed": [8]}, r"`closed` names \[8\]; the layer has 0 to 7"),
        ({"opened": [-1], "source": [0]}, r"`opened` names \[-1\]"),
        ({"opened": [1], "source": [8]}, r"`source` names \[8\]"),
        ({"opened": [0], "source": [3]}, r"slots \[0\] are open already"),
        ({"opened": [1], "source": [3, 4]}, "needs one source channel, got 1 slots and 2 channels"),
        ({"opened": [1, 1], "source": [3, 4]}, "`opened` names a slot twice"),
        ({"opened": [1], "source": [3], "shift": [[0.5]]}, r"shape \(1, 2\), got \(1, 1\)"),
        ({"opened": [1], "source": [3], "shift": [[0.5, np.nan]]}, "shifts must be finite"),
        ({"opened": [1], "source": [3], "weight_seed": 2**70}, f"`weight_seed`.*got {2**70}"),
        ({"opened": [1], "source": [0]}, "reallocate=False: its slots cannot be re-opened"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_nothing_changes(plan, message):
    layer = closed_layer(reallocate="reallocate" not in message)
    before = snapshot(layer)
    tensors = {key: torch.tensor(plan[key]) for key in plan if key != "weight_seed"}
    with pytest.raises(AllocationError, match=message):
        layer.apply_plan(LayerPlan(**{**plan, **tensors}))
    assert_same(snapshot(layer), before)


def test_planning_changes_nothing_and_applying_gives_what_the_calls_give():
    planned = closed_layer()
    called = copy.deepcopy(planned)
    before = snapshot(planned)
    plan = planned.plan(
        gamma=0.2, rule=ReallocRule(init="random"), generator=torch.Generator().manual_seed(5)
    )
    assert_same(snapshot(planned), before)
    assert len(plan.closed) > 0
    assert set(plan.closed.tolist()) <= set(plan.opened.tolist())
    planned.apply_plan(LayerPlan.from_dict(plan.to_dict()))
    called.dealloc(gamma=0.2)
    called.realloc(init="random", generator=torch.Generator().manual_seed(5))
    assert_same(snapshot(planned), snapshot(called))


def test_a_plan_scores_sources_as_if_its_slots_were_closed_already():
    # Slot 0 is closed: without it slot 1 is all of output 0, and passes slot 2 as a source.
    layer = with_necdm([[0.375, 0, 0], [0.625, 0, 0], [0, 0.6875, 0], [0, 0.3125, 1.0]])
    sources = set()
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        plan = layer.plan(gamma=0.5, rule=ReallocRule(top_k=2), generator=generator)
        assert plan.closed.tolist() == plan.opened.tolist() == [0]
        sources |= set(plan.source.tolist())
    assert sources == {1, 3}


# State


def small_model():
    conv = make_layer(dtype=torch.float32, padding=1)
    bn, relu = nn.BatchNorm2d(8), nn.ReLU()
    conv.mean_source = BatchNormMean(bn, relu)
    return nn.Sequential(bn, relu, conv)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_a_copys_mean_source_follows_the_copys_batch_norm(duplicate):
    model = small_model()
    assert set(model[2].state_dict()) == NEW_KEYS | {"weight", "bias"}
    allocate_mixed(model[2])
    twin = duplicate(model)
    x = make_input(dtype=torch.float32)
    assert torch.equal(twin(x), model(x))
    assert twin[2].mean_source.bn is twin[0]
    assert twin[2].mean_source.act is twin[1]
    before = model[2].input_mean()
    twin[0].bias.detach().add_(3.0)
    assert torch.equal(model[2].input_mean(), before)
    assert bool((twin[2].input_mean() > before)[twin[2].gate].all())
    twin[2].close(range(8))
    assert bool(model[2].gate.any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_moves_between_dtypes(dtype):
    model = small_model()
    model[2].close([1, 2])
    model.to(dtype)
    layer = model[2]
    assert layer.weight.dtype == layer.shift.dtype == dtype
    assert layer.gate.dtype == layer.moved.dtype == layer.shifted.dtype == torch.bool
    assert layer.index.dtype == torch.int64
    assert layer.ecdm().dtype == torch.promote_types(dtype, torch.float32)
    assert layer.realloc().tolist() == [1, 2]
    assert model(make_input(dtype=dtype)).dtype == dtype


def test_a_layer_moves_to_the_meta_device_and_shows_itself():
    layer = make_layer()
    allocate_mixed(layer)
    assert repr(layer) == ("SelectConv2d(8, 4, kernel_size=(3, 3), stride=(1, 1), open=6, moved=4)")
    layer = make_layer().to("meta")
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
    assert repr(layer) == "SelectConv2d(8, 4, kernel_size=(3, 3), stride=(1, 1))"
    assert layer(make_input().to("meta")).shape == (2, 4, 3, 4)
    on_meta = sc.SelectConv2d(8, 4, 3, device="meta")
    assert {tensor.device.type for tensor in on_meta.state_dict().values()} == {"meta"}


def write_through_numpy(tensor, value):
    tensor.detach().numpy()[...] = value.numpy()  # as a collective does: torch does not notice


WRITERS = {
    "copy_": lambda tensor, value: tensor.copy_(value),
    "data": lambda tensor, value: tensor.data.copy_(value),
    "raw storage": write_through_numpy,
    "set_data": lambda tensor, value: setattr(tensor, "data", value.clone()),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_the_next_forward_sees_buffers_that_were_written_in_place(write):
    layer, wanted = make_layer(), make_layer()
    wanted.load_state_dict(layer.state_dict())
    x = make_input()
    layer(x)
    allocate_mixed(wanted)
    with torch.no_grad():
        for name in ("gate", "index", "moved", "shifted", "shift"):
            write(getattr(layer, name), getattr(wanted, name).detach())
    assert torch.equal(layer(x), wanted(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    layer = sc.SelectConv2d(16, 8, 3, padding=1)
    layer.mean_source = ObservedMean()
    x = torch.randn(4, 16, 8, 8, requires_grad=True)
    layer(x)
    layer.close([1, 2])
    assert len(layer.realloc()) == 2
    inputs = [x, layer.weight, layer.shift]
    wanted = torch.autograd.grad(layer(x).square().sum(), inputs)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close([tensor.grad for tensor in inputs], wanted)


def test_a_layer_on_another_device_than_its_input_does_not_read_its_memory():
    layer = sc.SelectConv2d(8, 4, 1, device="meta")
    with pytest.raises(RuntimeError, match="expected device meta"):  # a kernel would crash
        layer(torch.randn(1, 8, 4, 4))


def test_a_plain_state_is_assigned_to_a_layer_without_memory():
    plain = nn.Conv2d(8, 4, 1)
    layer = sc.SelectConv2d(8, 4, 1, device="meta")
    layer.load_state_dict(plain.state_dict(), assign=True)
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(layer(x), plain(x))
    assert layer.gate.all()
    assert layer.index.tolist() == list(range(8))


def test_a_compiled_layer_can_be_copied_and_pickled():
    layer = sc.SelectConv2d(4, 4, 1)
    layer.compile(backend="eager")
    x = torch.randn(1, 4, 5, 5)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
