"""Networks closed by filters: random ones, then some of timm, then torchvision's classifiers."""

import random
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import selectconv as sc
from soak import architectures
from soak.driver import DIFFERENT, Ended, Wrong
from soak.networks import Walk
from soak.random_network import Builder, sum_of_squares

TITLE = "networks closed by filters to half of their multiply-adds, or as far as that goes"
WANTED = "the masked model's outputs after each step, and nothing gathered"
OF_RANDOM, OF_TIMM = 100, 30
COUNT, LIMIT_S = 210, 3600
TARGETS = (0.5, 0.7, 0.9, 0.97)


class FilterWalk(Walk):
    """A network on its way through all steps, closed by filters."""

    def allocate(self, gamma: float) -> None:
        """Train a step, close filters down to the nearest target, and train another."""
        optimizer = torch.optim.SGD(sc.param_groups(self.model), lr=0.01, weight_decay=1e-4)
        for target in TARGETS:
            with suppress(ValueError):  # it cannot be reached, or nothing can be closed
                allocator = sc.ChannelAllocator(
                    self.model, optimizer, total_epochs=1, stop_at=1.0, mode="dealloc",
                    granularity="filter", target_macs=target, example_input=self.x,
                )  # fmt: skip
                break
        else:
            raise sc.AllocationError(f"no target of {TARGETS} can be reached")
        self.data["target"] = target
        for epoch in range(2):
            optimizer.zero_grad()
            sum_of_squares(self.model.train()(self.x)).backward()
            optimizer.step()
            allocator.step(epoch)

    def take(self, step: str, action: Any) -> Any:
        """Take a step; what was compressed must not gather."""
        result = super().take(step, action)
        if step == "compressed" and any("index" in str(n.target) for n in result.graph.nodes):
            raise Wrong(self.what, DIFFERENT, "the compressed network gathers channels")
        return result


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Take a network through all steps."""
    torch.set_num_threads(1)
    torch.manual_seed(draw.getrandbits(32))
    warnings.simplefilter("ignore")
    if number < OF_RANDOM:
        builder = Builder(draw)
        model, x = builder.network()
        what = f"{builder.dims}-D: {', '.join(builder.used)}"
        return FilterWalk(model, x, what).all_the_way(scratch, 0.0)
    architectures.import_timm()
    if number < OF_RANDOM + OF_TIMM:
        what = architectures.names()[number - OF_RANDOM]
        model = architectures.create(what)
    else:
        from torchvision import models

        what = models.list_models(module=models)[number - OF_RANDOM - OF_TIMM]
        model = models.get_model(what, weights=None, num_classes=10)
    if sum(p.numel() for p in model.parameters()) > architectures.MOST_PARAMS:
        return Ended(what, architectures.TOO_LARGE)
    x = architectures.find_input(model)
    return FilterWalk(model, x, what).all_the_way(scratch, 0.0)
