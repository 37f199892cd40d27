"""Which path runs and why, and what the kernels promise besides being right (property/)."""

import copy
import stat
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import selectconv as sc
from selectconv.core import kernels
from selectconv.core.kernels import build, cpu
from selectconv.core.layer import SelectConvNd
from selectconv.core.paths import convolve_norm_relu
from selectconv.core.shift import reroute

CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(
    build.load_kernel().library is None, reason=f"C kernel: {build.load_kernel().about}"
)


@pytest.fixture
def fresh_build(monkeypatch, tmp_path):
    """Build anew, into an empty cache, and forget it afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    build.load_kernel.cache_clear()
    yield tmp_path
    build.load_kernel.cache_clear()


def moved_layer(slots=8, outputs=4, kernel=1):
    layer = sc.SelectConv2d(slots, outputs, kernel, padding=kernel // 2)
    layer.index[1], layer.shifted[1] = 3, True
    layer.index[2], layer.shifted[2] = 3, True
    layer.shift.detach()[1:3] = torch.tensor([[0.5, -1.25], [-2.0, 0.0]])
    return layer


def moved_model():
    model = sc.create_model("densenet40", selective=True, growth_rate=4, units=(2, 2))
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, SelectConvNd):
            layer.close([0, 3])
            layer.realloc(generator=generator)
    return model


def loss_and_gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


# building


def test_without_a_compiler_the_definition_runs_and_says_so(fresh_build, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh_build))
    assert kernels.describe_path(CPU) == (
        "torch's operations: no C compiler (cc, gcc, clang) found"
    )
    layer, x = moved_layer(), torch.randn(2, 8, 5, 5)
    assert not kernels.find_kernel(x)
    exact = F.conv2d(layer.select(x), layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), exact)
    assert "no C compiler" in str(sc.describe(nn.Sequential(layer)))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell script")
def test_a_compiler_that_fails_is_named(fresh_build, monkeypatch):
    broken = fresh_build / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'no licence today' >&2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    about = kernels.describe_path(CPU)
    assert about.startswith("torch's operations: the C kernel cannot be built or loaded")
    assert "broken-cc: no licence today" in about
    assert list((fresh_build / "cache" / "selectconv" / "kernels").iterdir()) == []


@needs_kernel
def test_a_built_kernel_is_found_again_without_a_compiler(fresh_build, monkeypatch):
    about = kernels.describe_path(CPU)
    assert about.startswith("C kernel, ")
    files = list((fresh_build / "cache" / "selectconv" / "kernels").iterdir())
    assert [path.suffix for path in files] == [".so"]
    build.load_kernel.cache_clear()
    monkeypatch.setenv("PATH", str(fresh_build))
    assert kernels.describe_path(CPU) == about


@needs_kernel
@pytest.mark.parametrize("home", [True, False])
def test_without_a_cache_the_kernel_lives_as_long_as_the_process(fresh_build, monkeypatch, home):
    (fresh_build / "cache").write_text("not a folder")
    if not home:  # then nobody knows where the cache is
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert kernels.describe_path(CPU).startswith("C kernel, ")


def test_other_devices_have_no_c_kernel():
    assert kernels.describe_path(torch.device("meta")) == ("torch's operations: no kernel for meta")


def test_describe_names_the_path():
    with kernels.simple_path():
        text = str(sc.describe(nn.Sequential(moved_layer())))
    assert text.endswith("; eager mode runs on torch's operations: simple_path() is on")


# when the kernel runs


@needs_kernel
@pytest.mark.parametrize(
    ("x", "runs"),
    [
        (torch.zeros(2, 3, 4, 4), True),
        (torch.zeros(2, 3, 4), True),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (torch.zeros(2, 3, 4, 4, dtype=torch.float64), False),
        (torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16), False),
        (torch.zeros(2, 3, 4, 4, 4), False),
        (torch.zeros(2, 3, 4, 8)[..., ::2], False),
        (torch.zeros(0, 3, 4, 4), False),
        (torch.zeros(2, 3, 4, 4, device="meta"), False),
    ],
)
def test_can_run(x, runs):
    assert (kernels.find_kernel(x) is not None) is runs


@needs_kernel
@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_not_where_single_operations_are_watched():
    x = torch.zeros(1, 2, 3, 3)
    seen = []
    torch.jit.trace(lambda t: (seen.append(kernels.find_kernel(t)), t + 1)[1], x, check_trace=False)
    torch.func.vmap(lambda t: (seen.append(kernels.find_kernel(t)), t)[1])(x[None])
    with FlopCounterMode(display=False):
        seen.append(kernels.find_kernel(x))
    with torch.autograd.forward_ad.dual_level():
        seen.append(kernels.find_kernel(x))
    assert not any(seen)
    assert kernels.find_kernel(x)


@needs_kernel
@pytest.mark.parametrize("watched", ["norm", "relu", "conv", "everything"])
def test_hooks_see_what_they_always_saw(watched):
    block = moved_model().blocks[0][0].pointwise
    x, seen = torch.randn(2, block.norm.num_features, 4, 4), []

    def hook(module, inputs, output):
        seen.append(type(module).__name__)

    if watched == "everything":
        handle = nn.modules.module.register_module_forward_hook(hook)
    else:
        handle = getattr(block, watched).register_forward_hook(hook)
    block(x)
    handle.remove()
    assert seen[-1] == (
        "NormReluConv"
        if watched == "everything"
        else {"norm": "BatchNorm2d", "relu": "ReLU", "conv": "SelectConv2d"}[watched]
    )


def test_another_entry_is_another_kernel_which_may_not_read_the_allocation(monkeypatch):
    calls = []

    def run(*arguments):
        calls.append(len(arguments))
        return reroute(*arguments)

    blind = kernels.Kernel(
        can_run=lambda x: True,
        find_obstacle=lambda device: None,
        describe=lambda: "blind",
        reroute=run,
        reads_allocation=False,
    )
    layer, x = moved_layer(), torch.randn(2, 8, 5, 5)
    layer.close([0, 5])
    exact = F.conv2d(layer.select(x), layer.weight, layer.bias)
    monkeypatch.setattr(kernels, "KERNELS", (blind,))
    monkeypatch.setattr(
        "selectconv.core.paths.summarize", lambda layer: pytest.fail("a GPU would wait")
    )
    torch.testing.assert_close(layer(x), exact)
    assert convolve_norm_relu(layer, x, nn.BatchNorm2d(8)) is None
    assert len(calls) == 1
    assert kernels.describe_path(CPU) == "blind"


@needs_kernel
@pytest.mark.parametrize(("size", "runs"), [(1, False), (2, True)])
def test_the_kernel_leaves_one_value_a_channel_to_torch(size, runs):
    layer = moved_layer()
    out = convolve_norm_relu(layer, torch.randn(1, 8, 1, size), nn.BatchNorm2d(8))
    assert (out is not None) == runs


# what it computes


@needs_kernel
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_deterministic_whatever_the_threads(memory_format):
    model = moved_model().to(memory_format=memory_format)
    block = next(m for m in model.modules() if type(m).__name__ == "NormReluConv")
    x = torch.randn(5, block.norm.num_features, 12, 12).to(memory_format=memory_format)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        shift = block.conv.shift.detach().clone().requires_grad_()
        is_open = block.conv.gate.nonzero().flatten()
        allocation = (block.conv.index[is_open], shift[is_open], block.conv.shifted[is_open])
        out = cpu.norm_relu_reroute(copy.deepcopy(block.norm), leaf, *allocation)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        results.append([out, leaf.grad, shift.grad])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@needs_kernel
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("compiled", [False, True])
def test_shifts_that_are_not_learned_get_a_gradient_of_zero(memory_format, compiled):
    model = moved_model().to(memory_format=memory_format)
    for layer in model.modules():
        if isinstance(layer, SelectConvNd) and layer.shift is not None:
            layer.shift.detach().round_()
    x = torch.randn(4, 3, 12, 12).to(memory_format=memory_format)
    learned = loss_and_gradients(model, x)
    names = [name for name, _ in model.named_parameters()]
    for layer in model.modules():
        layer.learns_shift = False
    run = torch.compile(model, backend="aot_eager") if compiled else model
    fixed = loss_and_gradients(run, x)
    for name, one, other in zip(names, learned, fixed, strict=True):
        if name.endswith("shift"):
            assert not other.any()
        else:
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
    layer, y = moved_layer(), torch.randn(2, 8, 5, 6).to(memory_format=memory_format)
    with torch.no_grad():
        layer.shift.round_()
        mine = layer(y)
        with kernels.simple_path():
            assert torch.equal(layer(y), mine)  # a copy: nothing is rounded


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_derivatives_the_same_bits_and_nothing_prepared_for_them(off, monkeypatch):
    model, x = moved_model().eval(), torch.randn(2, 3, 8, 8)
    want = model(x)
    monkeypatch.setattr(cpu, "differentiable", lambda *_: pytest.fail("derivatives"))
    with off():
        got = model(x)
    assert torch.equal(got, want)
    with pytest.raises(pytest.fail.Exception, match="derivatives"):  # here they are needed
        model(x)


def test_a_layer_trains_after_it_was_first_run_in_inference_mode():
    layer, x = moved_layer(), torch.randn(2, 8, 6, 6)
    layer.close([5])
    twin = copy.deepcopy(layer)
    with torch.inference_mode():
        layer(x)
    for one, other in zip(*(loss_and_gradients(model, x) for model in (layer, twin)), strict=True):
        assert torch.equal(one, other)


@needs_kernel
@pytest.mark.parametrize("training", [None, True, False], ids=["no norm", "training", "eval"])
def test_second_derivatives(training):
    norm, layer, x = nn.BatchNorm2d(8).train(bool(training)), moved_layer(), torch.randn(2, 8, 4, 4)
    norm.running_var.fill_(2.0)
    grads = []
    for exact in (False, True):
        n, leaf = copy.deepcopy(norm).double() if exact else norm, x.double() if exact else x
        leaf = leaf.detach().requires_grad_()
        shift = layer.shift.detach().to(leaf).requires_grad_()
        if exact:
            selected = leaf if training is None else F.relu(n(leaf))
            out = reroute(selected, layer.index, shift, layer.shifted)
        elif training is None:
            out = cpu.reroute(leaf, layer.index, shift, layer.shifted)
        else:
            out = cpu.norm_relu_reroute(n, leaf, layer.index, shift, layer.shifted)
        (first,) = torch.autograd.grad(out.pow(3).sum(), leaf, create_graph=True)
        inputs = [leaf, shift, *([] if training is None else [n.weight])]
        grads.append(torch.autograd.grad(first.square().sum(), inputs))
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3, check_dtype=False)


@needs_kernel
def test_running_statistics_without_momentum_are_the_plain_average():
    norm, exact = nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, momentum=None)
    layer = moved_layer(3)
    layer.index.clamp_(max=2)
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5) * 3 + 7
        cpu.norm_relu_reroute(norm, x, layer.index, None, layer.shifted)
        exact(x)
    torch.testing.assert_close(dict(norm.named_buffers()), dict(exact.named_buffers()))


@needs_kernel
def test_statistics_far_from_zero_keep_their_digits():
    x = torch.randn(8, 4, 16, 16) + 1e4
    for layout in (torch.contiguous_format, torch.channels_last):
        norm = nn.BatchNorm2d(4, momentum=1.0)
        same = (torch.arange(4), None, None)
        cpu.norm_relu_reroute(norm, x.to(memory_format=layout), *same)
        var = x.double().var(dim=(0, 2, 3))
        torch.testing.assert_close(norm.running_var.double(), var, rtol=1e-3, atol=0.0)


@needs_kernel
def test_nan_is_not_hidden_by_the_relu():
    norm, layer = nn.BatchNorm2d(8).eval(), moved_layer()
    x = torch.zeros(1, 8, 3, 3)
    x[0, 0, 0, 0] = float("nan")
    out = cpu.norm_relu_reroute(norm, x, layer.index, layer.shift, layer.shifted)
    assert out.isnan().nonzero().tolist() == [[0, 0, 0, 0]]


@needs_kernel
def test_an_index_out_of_range_is_an_error_not_a_crash():
    layer = moved_layer()
    layer.index[1] = 8
    with pytest.raises(IndexError, match="`index` names a channel that the input does not have"):
        layer(torch.randn(1, 8, 4, 4))
    layer.index[1] = -1
    with pytest.raises(IndexError, match="`index` names a channel"):
        layer(torch.randn(1, 8, 4, 4))


@needs_kernel
def test_closed_slots_are_not_convolved(monkeypatch):
    layer, shapes = sc.SelectConv2d(64, 64, 3, padding=1), []
    conv_forward = layer._conv_forward

    def watch(x, weight, bias):
        shapes.append(tuple(weight.shape))
        return conv_forward(x, weight, bias)

    monkeypatch.setattr(layer, "_conv_forward", watch)
    for closed in (0, 48):
        layer.close(range(closed))
        layer(torch.randn(1, 64, 6, 6))
    assert shapes == [(64, 64, 3, 3), (64, 16, 3, 3)]


# torch.compile


def test_few_graphs_serve_many_allocations():
    from torch._dynamo.testing import CompileCounter  # slow to import: only here

    torch._dynamo.reset()
    graphs = CompileCounter()
    model = sc.create_model("densenet40", selective=True, growth_rate=4, units=(1, 1)).eval()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    x = torch.randn(4, 3, 8, 8)
    for _ in range(6):
        for layer in model.modules():
            if isinstance(layer, SelectConvNd):
                layer.dealloc(gamma=0.3)
                layer.realloc()
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
    assert graphs.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_not_that_of_the_output(dtype):
    layer, x = moved_layer(), torch.randn(2, 8, 6, 6)
    want = layer(x)
    torch.set_default_dtype(dtype)
    assert torch.equal(layer(x), want)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("make", [sc.SelectConv2d, lambda *sizes: moved_layer()])
def test_functions_of_torch_func_compute_the_definition(make):
    layer, x = make(8, 4, 1), torch.randn(2, 8, 6, 6)
    leaf = x.clone().requires_grad_()
    layer(leaf).square().sum().backward()
    grad = torch.func.grad(lambda t: layer(t).square().sum())(x)
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-4, atol=1e-5)
    _, tangent = torch.func.jvp(lambda t: layer(t).square().sum(), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, leaf.grad.sum(), rtol=1e-3, atol=1e-3)
