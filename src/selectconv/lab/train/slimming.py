"""Network slimming (`--method slimming`): a baseline through Torch-Pruning's BN-scale pruner.

In the first part of the training an L1 penalty pushes batch norm's scales towards 0; then the
channels of the smallest scales are cut out, to a target; the rest of the training is fine-tuning.
Torch-Pruning does the penalty and the cutting; how much to cut is found here.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from selectconv.allocate.report import AllocationReport
from selectconv.checks import warn
from selectconv.core.plan import AllocationPlan, LayerPlan
from selectconv.deploy.cost import count_macs, count_params
from selectconv.errors import BadValue, RunError
from selectconv.extras import import_extra
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.train.config import TrainConfig
from selectconv.lab.train.network import build_model, fit_shapes
from selectconv.lab.zoo.densenet import DenseUnit
from selectconv.lab.zoo.resnet import Bottleneck

# No layer loses more of its channels than this.
MOST_OF_A_LAYER = 0.9
_KEPT = 1e3  # added to the scores, which are of order 1, of channels that must not be cut
# The search stops within this part of the target.
_CLOSE_ENOUGH = 0.002
_TRIALS = 14


class Slimmer:
    """Slim a plain network of the zoo, which may have been slimmed already, while it trains.

    All state is in the model: what was cut shows in its shapes.

    Attributes:
        importance: Torch-Pruning's score of the channels; batch norm's scales unless replaced.
        is_pruned: channels were cut.

    Raises:
        RunError: Torch-Pruning is not installed.
        ValueError: the target cannot be reached.
    """

    def __init__(self, config: TrainConfig, info: DatasetInfo, model: nn.Module) -> None:
        self.pruning = import_extra(
            "torch_pruning", "`--method slimming`", "selectconv[pruning]", error=RunError
        )
        self.importance = self.pruning.importance.BNScaleImportance()
        self.model, self.config, self.shape = model, config, info.shape
        with torch.device("meta"):
            dense = build_model(config, info)
        self._num_filters, self._dense_cost = count_filters(dense), self._cost(dense)
        self.name = "target_params" if config.target_macs is None else "target_macs"
        self.target = getattr(config, self.name) * self._dense_cost
        self.is_pruned = self.num_cut() > 0
        if not self.is_pruned:
            self._pruner = self._build_pruner(model, 0.5)
            least = self._cost(self._pruned(self._largest_ratio())[0])
            if least > self.target:
                raise BadValue(
                    f"`{self.name}` {getattr(config, self.name):g} cannot be reached: slimming "
                    f"cuts at most {MOST_OF_A_LAYER:.0%} of a layer, and then "
                    f"{least / self._dense_cost:.3f} of the dense network is left."
                )

    def _cost(self, model: nn.Module) -> int:
        """Count what is to meet the target."""
        by_macs = self.config.target_macs is not None
        return count_macs(model, self.shape) if by_macs else count_params(model)

    def num_cut(self) -> int:
        """Count the filters that were cut out of the network's convs."""
        return self._num_filters - count_filters(self.model)

    def regularize(self) -> None:
        """Add the penalty's gradient to those of batch norm's scales, until they are cut."""
        if not self.is_pruned:
            self._pruner.regularize(self.model, reg=self.config.bn_sparsity)

    def step(self, epoch: int) -> AllocationReport:
        """Cut the channels once the sparse part of the training is over.

        The model then has new parameters: it needs a new optimizer, and to be wrapped anew.

        Returns:
            The filters that were cut, by conv; false when nothing changed.
        """
        last_sparse_epoch = math.ceil(self.config.stop_at * self.config.epochs) - 1
        if epoch != last_sparse_epoch or self.is_pruned:
            return AllocationReport(epoch, AllocationPlan())
        chosen, history = self._find_target()
        fit_shapes(self.model, chosen.state_dict())
        self.model.load_state_dict(chosen.state_dict())
        self.is_pruned = bool(history)
        reached = self._cost(self.model)
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

    def _find_target(self) -> tuple[nn.Module, list[Any]]:
        """Search for the part of all channels whose cut meets the target, by bisection."""
        low, high = 0.0, self._largest_ratio()
        closest = math.inf
        best: tuple[nn.Module, list[Any]] = (self.model, [])
        for _ in range(_TRIALS):
            ratio = (low + high) / 2
            trial = self._pruned(ratio)
            found = self._cost(trial[0])
            if abs(found - self.target) < closest:
                closest, best = abs(found - self.target), trial
            if closest <= _CLOSE_ENOUGH * self.target:
                break
            low, high = (ratio, high) if found > self.target else (low, ratio)
        return best

    def _largest_ratio(self) -> float:
        """Return the part of all channels that is cut when every layer keeps its least."""
        groups = self._pruner.DG.get_all_groups(
            ignored_layers=self._pruner.ignored_layers,
            root_module_types=self._pruner.root_module_types,
        )
        widths = [len(group[0].idxs) // channel_groups(group) for group in groups]
        # A little less: Torch-Pruning rounds the number of channels that are left down.
        return 1 - sum(map(num_kept, widths)) / sum(widths) - 1e-6

    def _pruned(self, ratio: float) -> tuple[nn.Module, list[Any]]:
        """Return a copy of the model without that part of its channels, and what was cut."""
        model = copy.deepcopy(self.model)
        pruner = self._build_pruner(model, ratio)
        pruner.step()
        return model, pruner.pruning_history()

    def _build_pruner(self, model: nn.Module, ratio: float) -> Any:
        was_training = model.training
        pruner = self.pruning.pruner.BNScalePruner(
            model,
            (torch.zeros(1, *self.shape, device=next(model.parameters()).device),),
            importance=self._score,
            global_pruning=True,
            pruning_ratio=ratio,
            ignored_layers=fixed_layers(model),
        )
        model.train(was_training)  # its tracing leaves the model in evaluation mode
        return pruner

    def _score(self, group: Any) -> Tensor | None:
        """Score the channels of a group, the best ones of every layer above all others.

        Torch-Pruning ranks the channels of all layers at once, and leaves a layer whole that would
        lose all of them; so a layer must keep some.
        """
        found: Tensor | None = self.importance(group)
        if found is None:
            return None
        parts = channel_groups(group)
        mean = found.view(parts, -1).mean(dim=0)  # a grouped conv loses the same in each group
        bonus = torch.zeros_like(mean)
        bonus[mean.topk(num_kept(len(mean))).indices] = _KEPT
        return found + bonus.repeat(parts)


def num_kept(channels: int) -> int:
    """Return how many of a layer's channels are never cut."""
    return math.ceil(channels * (1 - MOST_OF_A_LAYER) - 1e-9)


def channel_groups(group: Any) -> int:
    """Return the groups of the grouped conv among the layers that lose channels together; or 1."""
    convs = [dep.target.module for dep, _ in group if isinstance(dep.target.module, nn.Conv2d)]
    return max((conv.groups for conv in convs), default=1)


def fixed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers whose outputs must not be cut.

    These are the classifier, and what Torch-Pruning cannot follow: a trunk whose shortcuts append
    zeros (ResNet), and the grouped convs of CondenseNet, whose outputs are concatenated.
    """
    modules = list(model.modules())
    fixed: list[nn.Module] = [module for module in modules if isinstance(module, nn.Linear)]
    trunk = [m.get_submodule("expand.conv") for m in modules if isinstance(m, Bottleneck)]
    if trunk:
        stem = model.get_submodule("stem")
        trunk += [module for module in stem.modules() if isinstance(module, nn.Conv2d)]
    units = [unit.get_submodule("spatial.conv") for unit in modules if isinstance(unit, DenseUnit)]
    grouped = [conv for conv in units if isinstance(conv, nn.Conv2d) and conv.groups > 1]
    return [*fixed, *trunk, *grouped]


def count_filters(model: nn.Module) -> int:
    """Count the outputs of a model's convs."""
    return sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
