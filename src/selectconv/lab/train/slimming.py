"""Network slimming (`--method slimming`): a baseline through Torch-Pruning's BN-scale pruner.

In the first part of the training an L1 penalty pushes batch norm's scales towards 0; then the
channels of the smallest scales are cut out, to a target; the rest of the training is fine-tuning.
Torch-Pruning does the penalty and the cutting; how much to cut is found here.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from selectconv.allocate.report import AllocationReport
from selectconv.checks import warn
from selectconv.core.plan import AllocationPlan, LayerPlan
from selectconv.deploy.cost import count_macs, count_params
from selectconv.errors import RunError
from selectconv.extras import import_extra
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.train.checkpoint import fit_shapes
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.methods import Plain
from selectconv.lab.train.network import build_model
from selectconv.lab.zoo.densenet import DenseUnit
from selectconv.lab.zoo.resnet import Bottleneck

# No layer loses more of its channels than this.
MOST_OF_A_LAYER = 0.9
_KEPT = 1e3  # added to the scores, which are of order 1, of channels that must not be cut
# The search stops within this part of the target.
_CLOSE_ENOUGH = 0.002
_TRIALS = 14

Cost = Callable[[nn.Module], int]
Importance = Callable[[Any], Tensor | None]
History = list[list[Any]]


def import_torch_pruning() -> Any:
    """Import Torch-Pruning.

    Raises:
        RunError: it is not installed.
    """
    return import_extra(
        "torch_pruning", "`--method slimming`", "selectconv[pruning]", error=RunError
    )


class Slimmer(Plain):
    """Slim a plain network of the zoo while it trains.

    Call `regularize` in every training step, after `backward`, and `step` after every epoch.

    All state is in the model: what was cut shows in its shapes.

    Args:
        model: the network, which may have been slimmed already.
        dense: a copy of it that has not been; it may be on the meta device.
        shape: of one image, without the batch.
        total_epochs: the length of the training.
        stop_at: the part of the training after which the channels are cut.
        target_macs: the multiply-adds to end at, as a part of the dense network's; or None.
        target_params: likewise for parameters; one of the two is given.
        sparsity: strength of the L1 penalty on batch norm's scales.

    Attributes:
        importance: Torch-Pruning's score of the channels; batch norm's scales unless replaced.
        is_pruned: channels were cut.

    Raises:
        RunError: Torch-Pruning is not installed.
        ValueError: the target cannot be reached.
    """

    def __init__(
        self,
        model: nn.Module,
        dense: nn.Module,
        shape: tuple[int, ...],
        *,
        total_epochs: int,
        stop_at: float,
        target_macs: float | None,
        target_params: float | None,
        sparsity: float,
    ) -> None:
        self.pruning = import_torch_pruning()
        self.model = model
        self.sparsity = sparsity
        self.importance: Importance = self.pruning.importance.BNScaleImportance()
        self.last_sparse_epoch = math.ceil(stop_at * total_epochs) - 1
        self._num_filters = count_filters(dense)
        self.cost: Cost = count_params if target_macs is None else lambda m: count_macs(m, shape)
        self.name = "target_params" if target_macs is None else "target_macs"
        fraction = target_params if target_macs is None else target_macs
        assert fraction is not None
        self._dense_cost = self.cost(dense)
        self.target = fraction * self._dense_cost
        self._example = torch.zeros(1, *shape)
        self.is_pruned = self.num_cut() > 0
        if not self.is_pruned:
            self._pruner = self._build_pruner(self.model, 0.5)
            least = self.cost(self._pruned(self._largest_ratio())[0])
            if least > self.target:
                raise ValueError(
                    f"`{self.name}` {fraction:g} cannot be reached: slimming cuts at most "
                    f"{MOST_OF_A_LAYER:.0%} of a layer, and then {least / self._dense_cost:.3f} of "
                    "the dense network is left."
                )

    @classmethod
    def build(
        cls, config: TrainConfig, info: DatasetInfo, model: nn.Module, optimizer: Optimizer
    ) -> Self:
        """Build the slimmer, with the sizes of the network before any cut."""
        with torch.device("meta"):
            dense = build_model(config, info)
        return cls(
            model,
            dense,
            info.shape,
            total_epochs=config.epochs,
            stop_at=config.stop_at,
            target_macs=config.target_macs,
            target_params=config.target_params,
            sparsity=config.bn_sparsity,
        )

    def num_cut(self) -> int:
        """Count the filters that were cut out of the network's convs."""
        return self._num_filters - count_filters(self.model)

    def counts(self) -> dict[str, int]:
        """Count the filters that were cut."""
        return {"moved": 0, "closed": self.num_cut()}

    def regularize(self) -> None:
        """Add the penalty's gradient to those of batch norm's scales, after `backward`."""
        if not self.is_pruned:
            self._pruner.regularize(self.model, reg=self.sparsity)

    def step(self, epoch: int) -> AllocationReport:
        """Cut the channels once the sparse part of the training is over.

        The model then has new parameters: it needs a new optimizer, and to be wrapped anew.

        Returns:
            The filters that were cut, by conv; false when nothing changed.
        """
        if epoch != self.last_sparse_epoch or self.is_pruned:
            return AllocationReport(epoch, AllocationPlan())
        ratio = self._largest_ratio()
        history = prune_to_target(self.model, self._pruned, ratio, self.cost, self.target)
        self.is_pruned = self.num_cut() > 0
        reached = self.cost(self.model)
        if abs(reached - self.target) > 0.01 * self.target:
            warn(
                f"`{self.name}`: slimming reached {reached / self._dense_cost:.3f} of the dense "
                f"network, the closest to {self.target / self._dense_cost:.3f} that it found."
            )
        plans = {
            name: LayerPlan(closed=torch.tensor(sorted(filters), dtype=torch.int64))
            for name, is_output, filters in history
            if is_output
        }
        return AllocationReport(epoch, AllocationPlan(plans))

    def _largest_ratio(self) -> float:
        """Return the part of all channels that is cut when every layer keeps its least."""
        pruner, widths = self._pruner, []
        for group in pruner.DG.get_all_groups(
            ignored_layers=pruner.ignored_layers, root_module_types=pruner.root_module_types
        ):
            widths.append(len(group[0].idxs) // channel_groups(group))
        # A little less: Torch-Pruning rounds the number of channels that are left down.
        return 1 - sum(map(num_kept, widths)) / sum(widths) - 1e-6

    def _pruned(self, ratio: float) -> tuple[nn.Module, History]:
        """Return a copy of the model without that part of its channels, and what was cut."""
        model = copy.deepcopy(self.model)
        pruner = self._build_pruner(model, ratio)
        pruner.step()
        return model, pruner.pruning_history()

    def _build_pruner(self, model: nn.Module, ratio: float) -> Any:
        was_training = model.training
        example = self._example.to(next(model.parameters()).device)
        pruner = self.pruning.pruner.BNScalePruner(
            model,
            (example,),
            importance=keep_some(self.importance),
            global_pruning=True,
            pruning_ratio=ratio,
            ignored_layers=fixed_layers(model),
        )
        model.train(was_training)  # its tracing leaves the model in evaluation mode
        return pruner


def keep_some(importance: Importance) -> Importance:
    """Make an importance score the best channels of every layer above those of all others.

    Torch-Pruning ranks the channels of all layers at once, and leaves a layer whole that would lose
    all of them; so a layer must keep some.
    """

    def scores(group: Any) -> Tensor | None:
        found = importance(group)
        if found is None:
            return None
        parts = channel_groups(group)
        mean = found.view(parts, -1).mean(dim=0)  # a grouped conv loses the same in each group
        bonus = torch.zeros_like(mean)
        bonus[mean.topk(num_kept(len(mean))).indices] = _KEPT
        return found + bonus.repeat(parts)

    return scores


def num_kept(channels: int) -> int:
    """Return how many of a layer's channels are never cut."""
    return math.ceil(channels * (1 - MOST_OF_A_LAYER) - 1e-9)


def channel_groups(group: Any) -> int:
    """Return the groups of the grouped conv among the layers that lose channels together; or 1."""
    convs = [dep.target.module for dep, _ in group if isinstance(dep.target.module, nn.Conv2d)]
    return max((conv.groups for conv in convs), default=1)


def prune_to_target(
    model: nn.Module,
    pruned: Callable[[float], tuple[nn.Module, History]],
    largest_ratio: float,
    cost: Cost,
    target: float,
) -> History:
    """Search for the pruning ratio that meets a target, and give the model the shape and weights.

    Args:
        model: the network; its modules get new parameters.
        pruned: makes a pruned copy of the model for a ratio.
        largest_ratio: the largest ratio that may be tried.
        cost: counts what is to meet the target.
        target: the cost to end at.

    Returns:
        Torch-Pruning's history of the chosen copy.
    """
    low, high = 0.0, largest_ratio
    best: tuple[float, nn.Module, History] | None = None
    for _ in range(_TRIALS):
        ratio = (low + high) / 2
        trial, history = pruned(ratio)
        found = cost(trial)
        miss = abs(found - target)
        if best is None or miss < best[0]:
            best = (miss, trial, history)
        if miss <= _CLOSE_ENOUGH * target:
            break
        low, high = (ratio, high) if found > target else (low, ratio)
    assert best is not None
    _, chosen, history = best
    weights = chosen.state_dict()
    fit_shapes(model, weights)
    model.load_state_dict(weights)
    return history


def fixed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers whose outputs must not be cut.

    These are the classifier, and what Torch-Pruning cannot follow: a trunk whose shortcuts append
    zeros (ResNet), and the grouped convs of CondenseNet, whose outputs are concatenated.
    """
    fixed: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fixed.append(module)
        elif isinstance(module, Bottleneck):
            fixed.append(module.get_submodule("expand.conv"))
        elif isinstance(module, DenseUnit):
            conv = module.get_submodule("spatial.conv")
            fixed += [conv] if isinstance(conv, nn.Conv2d) and conv.groups > 1 else []
    if any(isinstance(module, Bottleneck) for module in model.modules()):
        stem = model.get_submodule("stem")
        fixed += [module for module in stem.modules() if isinstance(module, nn.Conv2d)]
    return fixed


def count_filters(model: nn.Module) -> int:
    """Count the outputs of a model's convs."""
    return sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
