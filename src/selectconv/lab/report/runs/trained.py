"""A run's network before and after training, with test images, for figures."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selectconv.errors import SelectConvError
from selectconv.lab.data.image_set import ImageSet
from selectconv.lab.data.loaders import Batching, make_loader
from selectconv.lab.data.registry import load_dataset
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.train.network import build_model, load_network


@dataclass(frozen=True)
class Trained:
    """A run's network and images.

    Attributes:
        model: with the last weights, in evaluation mode.
        fresh: with the weights it began with.
        images: float (N, C, H, W), normalised test images.
        pictures: uint8 (N, C, H, W), the same to look at.
    """

    model: nn.Module
    fresh: nn.Module
    images: Tensor
    pictures: Tensor


def load_trained(run: Run, num_images: int) -> Trained | str:
    """Load a run's network and the first test images; or say why that is not possible."""
    if run.weights is None:
        return "It needs the run's last.safetensors, which was not kept."
    config = run.config
    try:
        splits = load_dataset(
            config.data,
            config.data_root,
            fetch=False,
            test_subset=config.test_subset,
            image_size=config.image_size,
        )
        torch.manual_seed(config.seed)
        fresh = build_model(config, splits.info)
        model = load_network(config, splits.info, run.weights)
    except (SelectConvError, TypeError, ValueError) as error:  # images or options are gone since
        return f"It could not be drawn: {error}"
    if not all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()):
        return f"It could not be drawn: {run.weights.name} holds NaN or infinite values."
    if not isinstance(splits.test, ImageSet):
        return "It is drawn for data sets of small images only."
    chosen = splits.test.take(torch.arange(min(num_images, len(splits.test))))
    loader = make_loader(chosen, splits.info, Batching(len(chosen), train=False))
    images, _ = next(loader.epoch(0))
    return Trained(model, fresh.eval(), images, chosen.images)


@torch.no_grad()
def watch_inputs(model: nn.Module, layer: str, images: Tensor, *, before: bool = False) -> Tensor:
    """Return what a layer gets as input for these images.

    Args:
        model: the network.
        layer: dotted name.
        images: its input.
        before: what the batch norm before the layer gives, before the activation: the paper's Y.
    """
    seen: list[Tensor] = []
    name = layer.rpartition(".")[0] + ".norm" if before else layer
    module = model.get_submodule(name)
    if before:
        # Copied at once: the activation works in place.
        hook = module.register_forward_hook(lambda m, inputs, output: seen.append(output.clone()))
    else:
        hook = module.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].clone()))
    try:
        model(images)
    finally:
        hook.remove()
    return seen[0].float()
