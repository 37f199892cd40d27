"""Every fast path computes the definition, for drawn shapes, allocations and layouts."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import selectconv as sc
from selectconv.core.kernels import cpu, simple_path
from selectconv.core.shift import reroute
from selectconv.lab.zoo.blocks import NormReluConv

# float32 sums of some hundred terms of size 1 to 10 against the same in float64.
CLOSE = {"rtol": 2e-4, "atol": 2e-4}
SELECT = {1: sc.SelectConv1d, 2: sc.SelectConv2d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}


@dataclass
class Case:
    """An input and an allocation: duplicates, sources that are moved themselves, far shifts."""

    x: torch.Tensor
    gate: torch.Tensor
    index: torch.Tensor
    shift: torch.Tensor
    shifted: torch.Tensor

    @property
    def axes(self):
        return self.x.ndim - 2

    @property
    def slots(self):
        return len(self.gate)

    def open_slots(self, shift):
        """The arguments of a kernel that computes the open slots, with this shift."""
        return self.index[self.gate], shift[self.gate], self.shifted[self.gate]

    def fill(self, layer):
        for name in ("gate", "index", "shifted"):
            getattr(layer, name).copy_(getattr(self, name))
        layer.shift.detach().copy_(self.shift)


@st.composite
def cases(draw, max_slots=9):
    axes, slots = draw(st.integers(1, 2)), draw(st.integers(1, max_slots))
    images = draw(st.sampled_from([1, 2, 3, 8, 9, 19]))
    size = [draw(st.integers(1, 7)) for _ in range(axes)]
    if draw(st.integers(0, 3)) == 0:
        size[-1] = draw(st.integers(30, 34))  # longer than a vector
    torch.manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(images, slots, *size) * 2 + torch.randn(slots, *[1] * axes)
    if axes == 2 and draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    exactly = {"min_size": slots, "max_size": slots}
    flags = st.lists(st.booleans(), **exactly).map(torch.tensor)
    gate = draw(flags)
    gate[draw(st.integers(0, slots - 1))] = True
    if draw(st.booleans()):
        gate[:] = True  # nothing is left out
    moved = draw(flags)
    source = torch.tensor(draw(st.lists(st.integers(0, slots - 1), **exactly)))
    reach = draw(st.sampled_from([1.5, 3.0, 20.0]))
    shift = (torch.rand(slots, axes) * 2 - 1) * reach
    if draw(st.booleans()):
        shift = shift.round()  # whole pixels
    index = torch.where(moved, source, torch.arange(slots))
    return Case(x, gate, index, shift, draw(flags))


def gradients(function, x, parameters):
    """The output and, for fixed random weights of it, the gradients of x and parameters."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    for parameter in parameters:
        parameter.grad = None
    out = function(leaf)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    before = leaf.detach().clone()
    (out * weights.to(out)).sum().backward()
    assert torch.equal(leaf, before)  # never writes into its input
    zero = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return [out.detach(), leaf.grad, *zero]


def assert_close(ours, exact):
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), **CLOSE)


def assert_same_in_double(module, x):
    """Compare a module's output and gradients with those of the same in float64."""
    exact = copy.deepcopy(module).double()
    fast = gradients(module, x, list(module.parameters()))
    with simple_path():
        assert_close(fast, gradients(exact, x.double(), list(exact.parameters())))
    assert_close(list(module.buffers()), list(exact.buffers()))


@given(cases())
def test_reroute_is_the_definition(case):
    def ours(x):
        return cpu.reroute(x, *case.open_slots(shift))

    def definition(x):
        return reroute(x, case.index, exact_shift, case.shifted)[:, case.gate]

    shift = case.shift.clone().requires_grad_()
    exact_shift = case.shift.double().requires_grad_()
    fast = gradients(ours, case.x, [shift])
    assert_close(fast, gradients(definition, case.x.double(), [exact_shift]))
    expected = case.x[:, case.gate]
    if case.axes == 2 and not case.x.is_contiguous() and not expected.is_contiguous():
        assert fast[0].is_contiguous(memory_format=torch.channels_last)


@given(cases(), st.booleans())
def test_norm_relu_reroute_is_the_definition(case, training):
    if training and case.x.numel() == case.slots:
        return  # batch norm refuses one value a channel
    norm = NORM[case.axes](case.slots)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    norm.train(training)
    exact = copy.deepcopy(norm).double()
    shift = case.shift.clone().requires_grad_()
    exact_shift = case.shift.double().requires_grad_()

    def ours(x):
        return cpu.norm_relu_reroute(norm, x, *case.open_slots(shift))

    def definition(x):
        return reroute(F.relu(exact(x)), case.index, exact_shift, case.shifted)[:, case.gate]

    fast = gradients(ours, case.x, [shift, *norm.parameters()])
    slow = gradients(definition, case.x.double(), [exact_shift, *exact.parameters()])
    assert_close(fast, slow)
    assert_close(list(norm.buffers()), list(exact.buffers()))


@given(cases(), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40), st.booleans())
def test_layer_is_its_simple_path(case, kernel, stride, outputs, grouped):
    groups = 2 if grouped and case.slots % 2 == 0 else 1
    layer = SELECT[case.axes](
        case.slots, groups * outputs, kernel, stride, padding=kernel // 2, groups=groups
    )
    case.fill(layer)
    if min(case.x.shape[2:]) + 2 * (kernel // 2) >= kernel:
        assert_same_in_double(layer, case.x)


@given(cases(), st.sampled_from([1, 3]), st.booleans())
def test_block_is_its_simple_path(case, kernel, training):
    x = case.x if case.axes == 2 else case.x[:, :, None]
    if training and x.numel() == case.slots:
        return
    shift = case.shift if case.axes == 2 else F.pad(case.shift, (1, 0))
    case = Case(x, case.gate, case.index, shift, case.shifted)
    block = NormReluConv()
    conv = sc.SelectConv2d(case.slots, 3, kernel, padding=kernel // 2)
    for name, module in (("norm", nn.BatchNorm2d(case.slots)), ("relu", nn.ReLU()), ("conv", conv)):
        block.add_module(name, module)
    case.fill(conv)
    block.train(training)
    assert_same_in_double(block, case.x)
