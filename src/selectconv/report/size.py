"""Parameters and multiply-adds of a run's network at its end, from its log."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from selectconv.cost import count_macs, count_params
from selectconv.data.registry import dataset_info
from selectconv.report.collect import Run
from selectconv.report.replay import CLOSED, replay
from selectconv.train.loop import build_model


@dataclass(frozen=True)
class Size:
    """Parameters without shift biases, as the paper counts, and multiply-adds for one image."""

    params: int
    macs: int


def measure_size(run: Run) -> Size | None:
    """Count a run's network without the weights of closed slots.

    None for methods that shrink a network in another way: its log does not tell its size.
    """
    if run.config.method != "plain" and not run.config.is_selective:
        return None
    info = dataset_info(run.config.data, run.config.image_size)
    with torch.device("meta"):  # shapes only
        model = build_model(replace(run.config, method="plain"), info).eval()
    params, macs = count_params(model), count_macs(model, info.shape)
    closed = {layer.name: layer.states[-1].count(CLOSED) for layer in replay(run)}
    if not any(closed.values()):
        return Size(params, macs)
    pixels: dict[str, int] = {}

    def watch(name: str, module: nn.Module) -> None:
        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            pixels[name] = output[0, 0].numel()

        module.register_forward_hook(note)

    for name in closed:
        watch(name, model.get_submodule(name))
    with torch.no_grad():
        model(torch.empty(1, *info.shape, device="meta"))
    for name, count in closed.items():
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        groups = model.get_submodule(name).groups
        assert isinstance(groups, int)
        cost = count * weight[:, 0].numel() // groups
        params -= cost
        macs -= cost * pixels[name]
    return Size(params, macs)
