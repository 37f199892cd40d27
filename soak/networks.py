"""Random networks all the way: convert, train, allocate, compress, save, load, ONNX."""

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import selectconv as sc
from selectconv.deploy.onnx import open_session
from soak.driver import DIFFERENT, FOREIGN, Ended, Wrong
from soak.random_network import Builder, sum_of_squares

TITLE = "random networks: convert, train, allocate, compress, save, load, ONNX"
WANTED = "the same outputs after each step, or a refusal that says why"
COUNT, LIMIT_S = 500, 3600
ALL_THE_WAY, WITHOUT_ONNX = "all the way", "all the way, ONNX not tried"


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Take a random network through all steps."""
    torch.set_num_threads(1)
    torch.manual_seed(draw.getrandbits(32))
    warnings.simplefilter("ignore")
    builder = Builder(draw)
    model, x = builder.network()
    walk = Walk(model, x, what=f"{builder.dims}-D: {', '.join(builder.used)}")
    gamma = draw.choice((0.1, 0.3, 0.6))
    return walk.all_the_way(scratch, gamma, draw.choice((None, None, 4)))


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return what a network computes, as a list of tensors."""
    with torch.no_grad():
        return [value for value in tree_leaves(model(x)) if isinstance(value, Tensor)]


class Refused(Exception):
    """A step was refused with an error of ours."""


class Walk:
    """A network on its way through all steps; each is held to the one before.

    Args:
        model: a plain network.
        x: a batch.
        what: its name.
    """

    def __init__(self, model: nn.Module, x: Tensor, what: str) -> None:
        self.model, self.x, self.what = model, x, what
        self.done: list[str] = []
        self.data: dict[str, Any] = {}

    def all_the_way(
        self, scratch: Path, gamma: float, round_to: int | None = None, *, onnx: bool = True
    ) -> Ended:
        """Go through all steps, ONNX too if wanted; a step that is refused ends the walk."""
        try:
            again, got = self._until_loaded(scratch, gamma, round_to)
            if onnx:
                self._to_onnx(scratch / "small.onnx", again, got)
        except Refused as refused:
            return Ended(self.what, f"refused: {self._step}", str(refused), self.row())
        return Ended(self.what, ALL_THE_WAY if onnx else WITHOUT_ONNX, data=self.row())

    def row(self) -> dict[str, Any]:
        """Return how far it came, and what it counted."""
        return {"done": self.done, **self.data}

    def _until_loaded(
        self, scratch: Path, gamma: float, round_to: int | None
    ) -> tuple[nn.Module, list[Tensor]]:
        """Return the network that was compressed, saved and loaded, and what it computes."""
        model, x = self.model, self.x
        before = outputs(model.eval(), x)
        self.take("converted", lambda: sc.convert(model, x))
        self.compare(before, outputs(model, x), 1e-5)
        self.take("re-allocated", lambda: self.allocate(gamma))
        model.eval()
        state = copy.deepcopy(model.state_dict())
        small = self.take("compressed", lambda: sc.compress(model, x, round_to=round_to))
        other = self._other_batch()
        got = outputs(small, other)
        # In float64: some networks magnify rounding to more than the tolerance.
        exact = [copy.deepcopy(network).double() for network in (model, small)]
        self.compare(*(outputs(network, other.double()) for network in exact), 1e-4)
        if not all(torch.equal(state[name], value) for name, value in model.state_dict().items()):
            raise Wrong(self.what, DIFFERENT, "compress changed the model")
        if round_to is None:
            params = self.take("counted", lambda: sc.count(model, x)).params
            if params != (have := sum(value.numel() for value in small.parameters())):
                raise Wrong(self.what, DIFFERENT, f"count says {params} parameters, not {have}")
        path = scratch / "small.safetensors"
        self.take("saved", lambda: sc.save_compressed(small, path))
        again = self.take("loaded", lambda: sc.load_compressed(path))
        self.compare(got, outputs(again, other), 0.0)
        return again, got

    def _to_onnx(self, path: Path, model: nn.Module, wanted: list[Tensor]) -> None:
        self.take("ONNX", lambda: sc.export_onnx(model, path, self.x))
        other = self._other_batch()
        exact = outputs(copy.deepcopy(model).double(), other.double())
        own = max(
            float((one - two).abs().max() / one.abs().max().clamp(min=1e-30))
            for one, two in zip(exact, wanted, strict=True)
        )
        # Some networks magnify rounding; onnxruntime's may be some times as large as PyTorch's.
        self.compare(exact, open_session(path)(other), max(1e-3, 8 * own))

    def _other_batch(self) -> Tensor:
        return torch.cat([0.5 * self.x, -self.x.flip(0)])

    def take(self, step: str, action: Callable[[], Any]) -> Any:
        """Take a step; an error of ours is a refusal, another one is wrong."""
        self._step = step
        try:
            result = action()
        except sc.SelectConvError as error:
            raise Refused(" ".join(str(error).split())[:300]) from error
        except Exception as error:
            detail = " ".join(f"{step}: {type(error).__name__}: {error}".split())[:300]
            raise Wrong(self.what, FOREIGN, detail) from error
        self.done.append(step)
        return result

    def allocate(self, gamma: float) -> None:
        """Train a step, close and re-open slots, and train another."""
        optimizer = torch.optim.SGD(sc.param_groups(self.model), lr=0.01, weight_decay=1e-4)
        allocator = sc.ChannelAllocator(self.model, optimizer, total_epochs=4, gamma=gamma)
        for epoch in range(2):
            optimizer.zero_grad()
            sum_of_squares(self.model.train()(self.x)).backward()
            optimizer.step()
            if epoch == 0:
                report = allocator.step(0)
                self.data["closed"] = sum(map(len, report.deallocated.values()))
                self.data["moved"] = sum(map(len, report.reallocated.values()))

    def compare(self, wanted: list[Tensor], got: list[Tensor], tolerance: float) -> None:
        """Compare outputs, relative to the largest value; NaN is a difference."""
        for one, other in zip(wanted, got, strict=True):
            worst = (one - other).abs().max() if one.shape == other.shape else torch.inf
            if not worst <= tolerance * one.abs().max() + 1e-30:
                detail = f"after {self.done[-1]!r}: outputs differ by {float(worst):.1e}"
                raise Wrong(self.what, DIFFERENT, detail)
