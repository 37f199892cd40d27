"""The Triton kernel against the definition, in Triton's interpreter: Python on CPU tensors."""

import importlib.util
import json
import os
import subprocess
import sys
import types
import warnings

import pytest
import torch

import selectconv as sc
from selectconv.core.kernels import describe_path, find_kernel, simple_path, triton_select
from selectconv.core.shift import reroute

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

# Rounding of float32 sums of tens of terms near 1; of one result in 8 and 11 bits. The interpreter
# cuts bfloat16 off where GPUs round, so there it may be a whole unit of the last place off.
CLOSE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

# Whole pixels, both edges of the frame, far beyond it.
OFFSETS = [0.3, -1.0, 2.0, -0.6, 0.0, 1.75, 3.0, -5.0, 6.5, -1e30, float("inf"), -2.2]
CASES = {
    "copies of one, and of itself": ((2, 4, 3, 5), [0, 1, 1, 1, 3], [0, 1, 1, 0, 1]),
    "one image": ((1, 3, 5, 2), [2, 2, 0, 1], [1, 1, 1, 1]),
    "one pixel": ((2, 2, 1, 1), [1, 1, 0], [1, 0, 1]),
    "one column": ((1, 2, 6, 1), [0, 0, 0], [1, 1, 1]),
    "one axis": ((2, 3, 7), [0, 2, 2, 2, 1], [1, 1, 0, 1, 1]),
    "one axis, one step": ((1, 2, 1), [1, 1], [1, 1]),
    "nothing shifted": ((2, 3, 2, 3), [2, 1, 2], [0, 0, 0]),
    "one channel": ((1, 1, 4, 3), [0, 0], [1, 0]),
}


@pytest.fixture
def _interpreted(monkeypatch):
    """Triton reads its switch where kernels are defined, so they are defined anew."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_select, "_IS_INTERPRETED", True)
    monkeypatch.setattr(triton_select, "_TILE", 8)  # several tiles even in a tiny map
    monkeypatch.setattr(triton_select, "_CHANNELS", 2)
    for cached in (triton_select._kernels, triton_select.find_obstacle):
        cached.cache_clear()
    yield
    for cached in (triton_select._kernels, triton_select.find_obstacle):
        cached.cache_clear()


def make(case, dtype=torch.float32, layout=torch.contiguous_format, start=0):
    shape, index, shifted = CASES[case]
    x = torch.randn(shape).to(dtype)
    if x.ndim == 4:
        x = x.contiguous(memory_format=layout)
    offsets = torch.tensor(OFFSETS).roll(-start).repeat(2)
    shift = offsets[: len(index) * (x.ndim - 2)].view(len(index), -1).clone()
    return x, torch.tensor(index), shift, torch.tensor(shifted, dtype=torch.bool)


def gradients(function, x, index, shift, shifted, seed):
    x, shift = x.detach().requires_grad_(), shift.detach().requires_grad_()
    out = function(x, index, shift, shifted)
    return out.detach(), *torch.autograd.grad(
        out, (x, shift), seed.to(x.dtype), allow_unused=True, materialize_grads=True
    )


@needs_triton
@pytest.mark.usefixtures("_interpreted")
class TestSelect:
    @pytest.mark.parametrize(
        ("layout", "start"), [(torch.contiguous_format, 0), (torch.channels_last, 5)], ids=str
    )
    @pytest.mark.parametrize("case", CASES)
    def test_equals_the_definition(self, case, layout, start):
        x, *allocation = make(case, layout=layout, start=start)
        assert triton_select.can_run(x)
        seed = torch.randn(len(x), len(allocation[0]), *x.shape[2:])
        out, grad_x, grad_shift = gradients(triton_select.reroute, x, *allocation, seed)
        expected = reroute(x, *allocation)
        assert torch.equal(out, expected)
        assert out.stride() == expected.stride()
        assert grad_x.stride() == x.stride()
        index, shift, shifted = allocation
        exact = gradients(reroute, x.double(), index, shift.double(), shifted, seed)
        torch.testing.assert_close(grad_x.double(), exact[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad_shift.double(), exact[2], rtol=1e-5, atol=1e-5)
        assert not grad_shift[~shifted].any()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("case", ["copies of one, and of itself", "one axis"])
    def test_half_precision_is_computed_in_float32(self, case, dtype):
        x, index, shift, shifted = make(case, dtype)
        seed = torch.randn(len(x), len(index), *x.shape[2:]).to(dtype)
        if case == "one axis":
            shift = shift.to(dtype)
        results = gradients(triton_select.reroute, x, index, shift, shifted, seed)
        assert [tensor.dtype for tensor in results] == [dtype, dtype, shift.dtype]
        exact = gradients(reroute, x.double(), index, shift.double(), shifted, seed)
        for result, expected in zip(results, exact, strict=True):
            tolerance = CLOSE[result.dtype]
            torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)

    def test_without_shifts_channels_are_copied(self):
        x, index, shift, shifted = make("copies of one, and of itself")
        for nothing in ((None, None), (shift, None), (None, shifted)):
            x.requires_grad_()
            out = triton_select.reroute(x, index, *nothing)
            assert torch.equal(out, x[:, index])
            seed = torch.randn_like(out)
            (grad_x,) = torch.autograd.grad(out, x, seed)
            expected = torch.zeros_like(x).index_add_(1, index, seed)
            torch.testing.assert_close(grad_x, expected)

    def test_whatever_lies_in_slots_that_are_not_shifted_is_not_read(self):
        x, index, shift, shifted = make("copies of one, and of itself")
        seed = torch.randn(len(x), len(index), *x.shape[2:])
        spoilt = shift.masked_fill(~shifted[:, None], float("nan"))
        expected = gradients(triton_select.reroute, x, index, shift, shifted, seed)
        for result, clean in zip(
            gradients(triton_select.reroute, x, index, spoilt, shifted, seed), expected, strict=True
        ):
            assert torch.equal(result, clean)

    def test_nan_in_a_shift_stays_visible(self):
        x, index, shift, shifted = make("one image")
        shift[1, 0] = float("nan")
        out = triton_select.reroute(x, index, shift, shifted)
        assert out.isnan().all(dim=(2, 3)).tolist() == [[False, True, False, False]]

    def test_any_strides_do(self):
        _, index, shift, shifted = make("one image")
        index, shift = index.repeat_interleave(2)[::2], shift.T.contiguous().T
        x = torch.randn(2, 3, 4, 10)[..., ::2].transpose(2, 3).requires_grad_()
        out = triton_select.reroute(x, index, shift, shifted)
        assert torch.equal(out, reroute(x, index, shift, shifted))
        (grad_x,) = torch.autograd.grad(out.sum(), x)  # a gradient with strides of zero
        (expected,) = torch.autograd.grad(reroute(x, index, shift, shifted).sum(), x)
        torch.testing.assert_close(grad_x, expected)

    @pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
    def test_second_derivatives(self, wanted):
        x, index, shift, shifted = make("one axis")
        results = []
        for function in (triton_select.reroute, reroute):
            leaves = [x.clone().requires_grad_(wanted[0]), shift.clone().requires_grad_(wanted[1])]
            out = function(leaves[0], index, leaves[1], shifted)
            leaves = [leaf for leaf in leaves if leaf.requires_grad]
            grads = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
        for result, expected in zip(*results, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)

    def test_asks_for_no_value_on_the_host(self):
        """What would synchronise a GPU fails on a tensor without values."""
        x, index, shift, shifted = make("one image")
        launched = []

        class Recorder:
            def __getitem__(self, grid):
                return lambda *tensors, **options: launched.append(grid)

        kernels = dict.fromkeys(("forward", "backward_x", "backward_shift"), Recorder())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                triton_select, "_kernels", lambda: triton_select.SimpleNamespace(**kernels)
            )
            meta = [tensor.to("meta") for tensor in (x, index, shift, shifted)]
            out = gradients(triton_select.reroute, *meta, torch.empty(1, 4, 5, 2, device="meta"))
        assert [tensor.shape for tensor in out] == [(1, 4, 5, 2), x.shape, shift.shape]
        assert launched == [
            (8,),
            (6,),
            (4,),
        ]  # two tiles of 8 for 10 pixels; slots, channels, slots


@needs_triton
@pytest.mark.usefixtures("_interpreted")
class TestCanRun:
    def test_not_where_it_does_not_serve(self):
        x = torch.zeros(1, 2, 3, 4)
        assert triton_select.can_run(x)
        assert not triton_select.can_run(x.double())
        assert not triton_select.can_run(x[..., None])
        assert not triton_select.can_run(x.to("meta"))
        assert find_kernel(x) is triton_select.KERNEL
        with simple_path():
            assert find_kernel(x) is None

    def test_on_the_cpu_in_the_interpreter_only(self, monkeypatch):
        monkeypatch.setattr(triton_select, "_IS_INTERPRETED", False)
        triton_select.find_obstacle.cache_clear()
        assert not triton_select.can_run(torch.zeros(1, 2, 3))
        assert triton_select.find_obstacle(torch.device("cpu")) == ""


def wrong(x, index, shift, shifted):
    return 1.01 * reroute(x, index, shift, shifted)


def failing(x, index, shift, shifted):
    raise OSError("no licence\nfor this GPU")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [(wrong, "differs from the definition"), (failing, "cannot be used: no licence"), (None, None)],
)
def test_at_its_first_use_the_kernel_is_compared_with_the_definition(kernel, reason, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setattr(triton_select, "_IS_INTERPRETED", True)
    monkeypatch.setattr(triton_select, "reroute", kernel or reroute)
    triton_select.find_obstacle.cache_clear()
    layer, x = sc.SelectConv2d(8, 4, 1), torch.randn(2, 8, 5, 5)
    layer.index[1], layer.shifted[1] = 3, True
    with warnings.catch_warnings(record=True) as caught, torch.inference_mode():
        warnings.simplefilter("always")
        for _ in range(2):  # the second time it is known
            found = find_kernel(x)
    assert (found is triton_select.KERNEL) is (reason is None)
    told = [warning for warning in caught if warning.category is sc.SelectConvWarning]
    assert len(told) == (reason is not None)
    if reason is not None:
        assert reason in str(told[0].message)
        exact = torch.nn.functional.conv2d(layer.select(x), layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), exact)
        monkeypatch.setattr("selectconv.core.kernels.KERNELS", (triton_select.KERNEL,))
        assert reason in describe_path(x.device)
    triton_select.find_obstacle.cache_clear()


def run(script, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_triton_it_says_so_and_importing_asks_for_nothing():
    script = """
import json, sys, torch
before = "triton" in sys.modules
from selectconv.core.kernels import triton_select
after = "triton" in sys.modules
for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]
sys.modules["triton"] = None
x = torch.zeros(1, 2, 3)
obstacle = triton_select.find_obstacle(x.device)
print(json.dumps([before == after, triton_select.can_run(x), obstacle]))
"""
    assert run(script, TRITON_INTERPRET="1") == [True, False, "triton is not installed"]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition_on_a_gpu(case, dtype):
    x, index, shift, shifted = make(case, dtype)
    seed = torch.randn(len(x), len(index), *x.shape[2:]).to(dtype)
    exact = gradients(reroute, x.double(), index, shift.double(), shifted, seed)
    on_gpu = [tensor.cuda() for tensor in (x, index, shift, shifted)]
    assert triton_select.can_run(on_gpu[0])
    results = gradients(triton_select.reroute, *on_gpu, seed.cuda())
    for result, expected in zip(results, exact, strict=True):
        tolerance = 2 * CLOSE[result.dtype]
        torch.testing.assert_close(result.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@needs_triton
@pytest.mark.parametrize("capability", [80, 90], ids=["A100", "H100"])
def test_compiles_for_a_gpu(capability, tmp_path):
    """The interpreter forgives what the compiler does not; that needs no GPU."""
    script = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from selectconv.core.kernels import triton_select

types = {"x": "*bf16", "grad": "*bf16", "out": "*bf16", "grad_x": "*bf16", "index": "*i64"}
types |= {"readers": "*i64", "first": "*i64", "shift": "*fp32", "shifted": "*i1", "parts": "*fp32"}
blocks = {"HAS_SHIFT": True, "PIXELS": 32, "CHANNELS": 32}
sizes = {}
for name, kernel in vars(triton_select._kernels()).items():
    signature = {
        arg: "constexpr" if arg in blocks else types.get(arg, "i32") for arg in kernel.arg_names
    }
    source = ASTSource(kernel, signature, blocks)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(source, target=target, options=options)
    sizes[name] = len(compiled.asm["cubin"])
print(json.dumps(sizes))
"""
    sizes = run(script, str(capability), TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert set(sizes) == {"forward", "backward_x", "backward_shift"}
    assert all(sizes.values())
