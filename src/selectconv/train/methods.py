"""What a run's method does to the channels of its network while it trains."""

import torch
from torch import nn

from selectconv.allocate.allocator import ChannelAllocator
from selectconv.core.layer import SelectConvNd
from selectconv.data.image_set import DatasetInfo
from selectconv.train.config import TrainConfig
from selectconv.train.network import build_model
from selectconv.train.slimming import Slimmer
from selectconv.zoo.learned_group_conv import Condenser

Method = ChannelAllocator | Condenser | Slimmer


def build_method(
    config: TrainConfig,
    info: DatasetInfo,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Method | None:
    """Build what acts on the channels after each epoch; None for a plain training."""
    if config.is_selective:
        return ChannelAllocator(
            model,
            optimizer,
            total_epochs=config.epochs,
            gamma=config.gamma,
            top_k=config.top_k,
            max_copies=config.max_copies,
            stop_at=config.stop_at,
            grace=config.grace,
            mode=config.method,
            damage=config.damage,
            seed=config.seed,
            target_macs=config.target_macs,
            target_params=config.target_params,
            example_input=torch.zeros(1, *info.shape),
        )
    if config.method == "lgc":
        return Condenser(model, total_epochs=config.epochs, group_lasso=config.group_lasso)
    if config.method == "slimming":
        with torch.device("meta"):
            dense = build_model(config, info)
        return Slimmer(
            model,
            dense,
            info.shape,
            total_epochs=config.epochs,
            stop_at=config.stop_at,
            target_macs=config.target_macs,
            target_params=config.target_params,
            sparsity=config.bn_sparsity,
        )
    return None


def count_channels(model: nn.Module, method: Method | None) -> dict[str, int]:
    """Count what a line of metrics tells of the channels: those moved and those closed.

    Closed are a selective network's slots; with lgc, the pairs of a group of filters and an input
    that it dropped; with slimming, the filters that were cut.
    """
    if isinstance(method, Condenser):
        return {"moved": 0, "closed": method.num_dropped()}
    if isinstance(method, Slimmer):
        return {"moved": 0, "closed": method.num_cut()}
    layers = [layer for layer in model.modules() if isinstance(layer, SelectConvNd)]
    return {
        "moved": sum(int((layer.moved & layer.gate).sum()) for layer in layers),
        "closed": sum(int((~layer.gate).sum()) for layer in layers),
    }
