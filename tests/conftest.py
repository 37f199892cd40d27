"""Settings of the whole suite: every test starts from the same state and leaves it as it was."""

import importlib
import os
import signal
from contextlib import suppress
from unittest.mock import patch

# oneDNN picks AMX kernels for bfloat16 that die on some machines; set before its first operation.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Triton's own library must be interpreted too, where it is installed; torchvision imports it.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

import torchvision_shim

torchvision_shim.install()
with suppress(ImportError):
    importlib.import_module("triton")
del os.environ["TRITON_INTERPRET"]  # its tests switch it on, and all others run the C kernel
settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Two workers share two cores.
torch.set_num_threads(1)
# A shell starts background jobs with SIGINT ignored, and the processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_state_for_every_test():
    random_state = torch.get_rng_state()
    dtype, threads, grad = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )
    torch.manual_seed(0)
    with patch.dict(os.environ):
        yield
    torch.set_rng_state(random_state)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
