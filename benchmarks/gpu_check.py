"""Check and time the Triton kernel on a CUDA device: `make gpu-check`.

    python benchmarks/gpu_check.py [--out FILE]

Runs the tests that need a GPU, holds the kernel to the definition for drawn cases in three dtypes
and both memory formats, times it and a training step, and prints a report to send back. The exit
code is 0 if all is well, 1 if there is no CUDA device, or something failed.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import selectconv
from selectconv.core.kernels import describe_path, triton_select
from selectconv.core.shift import reroute
from selectconv.lab.bench.cases import Subject, training_step

# One rounding of a result in 24, 11 and 8 bits; sums of a gradient are computed in float32.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
SHAPES = [(2, 5, 7, 9), (3, 64, 8, 8), (1, 33, 1, 1), (4, 16, 32, 17), (2, 24, 56, 56), (2, 8, 31)]
FORMATS = {"NCHW": torch.contiguous_format, "channels last": torch.channels_last}


def draw_case(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw an input and an allocation on the CPU, in float64."""
    generator = torch.Generator().manual_seed(seed)
    slots, axes = shape[1], len(shape) - 2
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    index = torch.randint(slots, (slots,), generator=generator)
    shift = (torch.rand(slots, axes, generator=generator, dtype=torch.float64) * 2 - 1) * 3
    shift[::3] = shift[::3].round()  # whole pixels
    shifted = torch.rand(slots, generator=generator) < 0.7
    return x, index, shift.float().double(), shifted


def results(
    function: Callable[..., Tensor], x: Tensor, index: Tensor, shift: Tensor, shifted: Tensor
) -> list[Tensor]:
    """Return the output and both gradients, for weights of the output that are its own numbers."""
    x, shift = x.detach().requires_grad_(), shift.detach().requires_grad_()
    out = function(x, index, shift, shifted)
    seed = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad(out, (x, shift), seed.to(out))
    return [out.detach(), *grads]


def largest_difference(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest value that is wanted."""
    want = want.double()
    return float((got.double().cpu() - want).abs().max() / want.abs().max().clamp(min=1e-12))


def check_kernel(device: torch.device) -> list[dict[str, Any]]:
    """Compare the kernel with the definition in float64 on the CPU."""
    rows = []
    for shape, (dtype, tolerance), layout in product(SHAPES, TOLERANCE.items(), FORMATS):
        x, index, shift, shifted = draw_case(shape, seed=0)
        x = x.to(dtype).double()  # what the kernel sees, exactly
        want = results(reroute, x, index, shift, shifted)
        own = x.to(device, dtype)
        if x.ndim == 4:
            own = own.contiguous(memory_format=FORMATS[layout])
        rest = (index.to(device), shift.float().to(device), shifted.to(device))
        got = results(triton_select.reroute, own, *rest)
        worst = max(map(largest_difference, got, want))
        case = f"{shape}, {dtype}, {layout}"
        rows.append({"case": case, "difference": worst, "ok": worst <= tolerance})
    return rows


def time_gpu(run: Callable[[], object], repeats: int = 20) -> list[float]:
    """Time calls by events on the device, in milliseconds, after a warm-up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return times


def time_kernel(device: torch.device) -> dict[str, list[float]]:
    """Time forward and backward of the kernel and of the definition, and of copying the input."""
    x = torch.randn(64, 256, 32, 32, device=device, requires_grad=True)
    _, index, shift, shifted = draw_case((1, 256, 2, 2), 0)
    rest = (index.to(device), shift.float().to(device).requires_grad_(), shifted.to(device))

    def both(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: function(x, *rest).sum().backward()

    return {
        "kernel, ms": time_gpu(both(triton_select.reroute)),
        "definition, ms": time_gpu(both(reroute)),
        "clone, ms": time_gpu(lambda: x.clone().sum().backward()),
    }


def time_step(device: torch.device) -> dict[str, list[float]]:
    """Time a training step of DenseNet-40, plain and with 20% of the slots moved."""
    subject = Subject("densenet40")
    images = subject.draw_images().to(device)
    return {
        f"DenseNet-40 step, {kind}, ms": time_gpu(
            training_step(subject.build_network(kind).to(device), images)
        )
        for kind in ("plain", "moved")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_report.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device here; nothing was checked.", file=sys.stderr)
        return 1
    device = torch.device("cuda")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    root = Path(__file__).parents[1]
    tests = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    checks = check_kernel(device)
    times = time_kernel(device) | time_step(device)
    report = {
        "selectconv": selectconv.__version__,
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "gpu": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "python": platform.python_version(),
        "path": describe_path(device),
        "tests": tests.stdout.splitlines(),
        "kernel against definition": checks,
        "times": {
            name: {"median": statistics.median(values), "spread": [min(values), max(values)]}
            for name, values in times.items()
        },
    }
    text = json.dumps(report, indent=1)
    options.out.write_text(text + "\n")
    print(text)
    is_well = tests.returncode == 0 and all(row["ok"] for row in checks)
    print(f"{'All is well' if is_well else 'FAILED'}. Please send {options.out} back.")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
