"""What a run is: one flat set of settings, the same words in YAML, flags and `config.yaml`.

Defaults come from `recipes.yaml`: the paper's settings for the pair of model and data set.
"""

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from selectconv.allocate.budget import check_targets
from selectconv.checks import check_choice, check_count, check_fraction, check_non_negative
from selectconv.core.slots import DAMAGES
from selectconv.data.registry import dataset_info, list_datasets
from selectconv.train.methods import METHODS, MethodInfo
from selectconv.zoo.external import check_model_name

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
NO_CAP = "none"  # how `max_copies` is written where there is no cap


@dataclass(frozen=True)
class TrainConfig:
    """All that is needed to repeat a run.

    Attributes:
        model: a name of `sc.list_models()`, `timm:NAME`, or `package.module:function`.
        model_options: further arguments of the network, such as growth_rate and units; for a
            network from outside the zoo also `realloc` and `min_channels` of `sc.convert`.
        data: a data set of `selectconv data list`.
        method: plain, select (+D+R zero+shift), zero, random, dealloc or shift (+S); or a baseline:
            lgc (CondenseNet's learned group convolution) or slimming (network slimming).
        epochs: passes over the training set.
        batch_size: images a step, over all processes.
        lr: where the cosine starts; it ends at 0.
        momentum: of SGD, Nesterov's.
        weight_decay: of everything but the shifts.
        shift_weight_decay: of the shifts.
        gamma: the damage level of dealloc.
        top_k: K, candidates of realloc.
        max_copies: N_max; None: no cap.
        stop_at: the part of the training in which channels are selected.
        grace: epochs in which a re-opened slot is not closed again.
        damage: auto, mean (the paper) or rms.
        target_macs: multiply-adds to end at, as a part of the dense network's; None: no target.
        target_params: likewise for parameters; at most one of the two.
        group_lasso: strength of lgc's group lasso.
        bn_sparsity: strength of slimming's L1 penalty on batch norm's scales.
        seed: of weights, order, augmentation and allocation.
        data_root: where the data set lies; nothing else is searched then. None: the known places.
        subset: so many training images only; None: all.
        test_subset: so many test images only; None: all.
        image_size: shrink the images to this height and width; None: as they are.
        holdout: at the end, test the last weights on every image that was not trained on.
        device: auto, cpu, cuda or mps.
        precision: 32-true, bf16-mixed or 16-mixed.
        compile: run the model through torch.compile.
        channels_last: keep images and weights in channels-last order.
    """

    model: str
    model_options: dict[str, Any]
    data: str
    method: str
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    shift_weight_decay: float
    gamma: float
    top_k: int
    max_copies: int | None
    stop_at: float
    grace: int
    damage: str
    target_macs: float | None
    target_params: float | None
    group_lasso: float
    bn_sparsity: float
    seed: int
    data_root: str | None
    subset: int | None
    test_subset: int | None
    image_size: int | None
    holdout: bool
    device: str
    precision: str
    compile: bool
    channels_last: bool

    def __post_init__(self) -> None:
        check_model_name(self.model)
        check_choice("data", self.data, list_datasets())
        check_choice("method", self.method, METHODS)
        check_choice("damage", self.damage, DAMAGES)
        check_choice("device", self.device, DEVICES)
        check_choice("precision", self.precision, PRECISIONS)
        for name in ("epochs", "batch_size", "top_k"):
            check_count(name, getattr(self, name), 1)
        for name in ("max_copies", "subset", "test_subset"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        info = dataset_info(self.data, self.image_size)
        for name, most in (("subset", info.num_train), ("test_subset", info.num_test)):
            if (getattr(self, name) or 0) > most:
                raise ValueError(
                    f"`{name}` must be at most {most:,}, the images of {self.data}; "
                    f"got {getattr(self, name):,}."
                )
        check_count("grace", self.grace, 0)
        check_count("seed", self.seed, 0)
        for name in ("gamma", "stop_at", "momentum"):
            check_fraction(name, getattr(self, name))
        for name in ("lr", "weight_decay", "shift_weight_decay", "group_lasso", "bn_sparsity"):
            check_non_negative(name, getattr(self, name))
        self._check_method()
        for name in ("holdout", "compile", "channels_last"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be true or false, got {getattr(self, name)!r}.")
        if not isinstance(self.model_options, dict):
            raise TypeError(
                "`model_options` must be a mapping such as {growth_rate: 8}, "
                f"got {self.model_options!r}."
            )
        if self.data_root is not None and not isinstance(self.data_root, str):
            raise TypeError(f"`data_root` must be a folder, got {self.data_root!r}.")

    def _check_method(self) -> None:
        """Check what the method asks of the other settings."""
        method = self.method_info
        for name in check_targets(self.target_macs, self.target_params):
            if not method.has_target:
                able = ", ".join(other.name for other in METHODS.values() if other.has_target)
                raise ValueError(f"`{name}` goes with the methods {able}; got {self.method!r}.")
        if method.needs_model not in (None, self.model):
            raise ValueError(
                f"`method` {method.name} needs `model` {method.needs_model}, got {self.model!r}."
            )
        if method.has_penalty and self.precision == "16-mixed":
            raise ValueError(
                f"`method` {method.name} adds its penalty to unscaled gradients: `precision` must "
                "be 32-true or bf16-mixed, got '16-mixed'."
            )
        if method.cuts and self.stop_at == 0:
            raise ValueError(
                f"`stop_at` must be above 0 for {method.name}, which cuts channels then; got 0."
            )

    @property
    def method_info(self) -> MethodInfo:
        """The method's row in the table of methods."""
        return METHODS[self.method]

    @property
    def is_selective(self) -> bool:
        """Whether the network has selective convs."""
        return self.method_info.is_selective

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain types, in the order in which they are documented."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        # In YAML, null is "not given"; no cap is a setting of its own.
        return {**settings, "max_copies": NO_CAP if self.max_copies is None else self.max_copies}

    @property
    def run_name(self) -> str:
        """A name for the run's folder."""
        return as_file_name(f"{self.model}-{self.data}-{self.method}-{self.seed}")

    def lr_at(self, step: int, steps: int) -> float:
        """Compute the learning rate of a step: a cosine from `lr` to 0 over the whole training."""
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / steps))


def as_file_name(name: str) -> str:
    """Return a name that every file system accepts.

    Example:
        >>> as_file_name("timm:resnet18-cifar10-plain-0")
        'timm-resnet18-cifar10-plain-0'
    """
    return re.sub(r"[^\w.-]", "-", name)


def setting_names() -> list[str]:
    """Return the names of all settings."""
    return [field.name for field in fields(TrainConfig)]


@cache
def _recipes() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(
        (files("selectconv.train") / "recipes.yaml").read_text()
    )
    return content


def resolve(given: Mapping[str, Any]) -> TrainConfig:
    """Fill in the paper's settings for the pair of model and data set wherever none is given.

    Raises:
        TypeError, ValueError: an unknown setting, or a value that is not accepted.
    """
    for name in given:
        check_choice("setting", name, setting_names())
    recipes = _recipes()
    settings: dict[str, Any] = copy.deepcopy(recipes["common"])
    settings.update({name: given[name] for name in ("model", "data") if name in given})
    check_model_name(settings["model"])
    check_choice("data", settings["data"], list_datasets())
    # A model's recipe is the more specific one: CondenseNet trains longer than CIFAR's default.
    settings.update(recipes["data"].get(settings["data"], {}))
    settings.update(recipes["model"].get(settings["model"], {}))
    settings.update(given)
    method = METHODS.get(settings["method"])
    if method is not None and settings["target_macs"] is settings["target_params"] is None:
        settings["target_macs"] = method.target_macs
    if settings["max_copies"] == NO_CAP:
        settings["max_copies"] = None
    return TrainConfig(**settings)
