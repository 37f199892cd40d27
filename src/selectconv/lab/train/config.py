"""What a run is: one flat set of settings, the same words in YAML, flags and `config.yaml`.

Each setting is declared once, here: its flag, help, checks and place in a report follow from it.
The paper's values, for the pair of model and data set, are in `recipes.yaml`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, get_args, get_type_hints

import yaml

from selectconv.checks import check_choice, check_fraction, check_gamma, check_non_negative
from selectconv.lab.train.methods import METHODS, MethodInfo
from selectconv.lab.train.settings import (
    Setting,
    choice,
    damage_names,
    dataset_name,
    declaration,
    default_of,
    instance,
    model_name,
    optional,
    seeds,
    setting,
    truth,
    whole,
)

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All that is needed to repeat a run; `selectconv train --help` explains the settings."""

    model: str = setting(
        "the network: a name from `selectconv models`, timm:NAME, or package.module:function, "
        "a function that is called with num_classes and in_channels",
        model_name,
        group="task",
        default="densenet40",
    )
    model_options: dict[str, Any] = setting(  # noqa: RUF009 - makes a field
        "options of the network, such as '{growth_rate: 8, units: [3, 3, 3]}'; for networks that "
        "are not from `selectconv models`, also `realloc` and `min_channels` of `sc.convert`",
        instance(dict, "a mapping such as {growth_rate: 8}"),
        group="task",
        default={},
    )
    data: str = setting(
        "the data set: a name from `selectconv data list`, or imagefolder:DIR for your own images, "
        "where DIR has train/ and test/, each with one folder per class",
        dataset_name,
        group="task",
        default="cifar10",
    )
    method: str = setting(
        f"one of {', '.join(METHODS)}; select is the paper's method, dealloc only closes channels, "
        "plain changes nothing",
        choice(METHODS.keys),
        group="aside",
        default="select",
    )
    epochs: int = setting("number of passes over the training set", whole(1))
    batch_size: int = setting("images per step, over all processes", whole(1))
    lr: float = setting(
        "learning rate at the start; it falls to 0 along a cosine",
        check_non_negative,
        group="tuning",
    )
    momentum: float = setting("Nesterov momentum", check_fraction)
    weight_decay: float = setting(
        "weight decay of everything but the shifts", check_non_negative, group="tuning"
    )
    shift_weight_decay: float = setting(
        "weight decay of the shifts", check_non_negative, group="selection"
    )
    gamma: float | str = setting(
        "largest share of any of a layer's outputs that one step may remove, from 0 to 1, or auto "
        "to let each step choose it",
        check_gamma,
        group="selection",
    )
    top_k: int = setting(
        "K: a re-opened slot reads one of the K most important channels",
        whole(1),
        group="selection",
    )
    max_copies: int | None = setting(
        "N_max: largest number of copies of a channel, or none for no limit",
        optional(whole(1, "a whole number or none")),
        group="selection",
        none_word="none",
    )
    stop_at: float = setting(
        "first part of the training in which channels are de- and re-allocated, from 0 to 1",
        check_fraction,
        group="selection",
    )
    grace: int = setting(
        "epochs before a re-opened slot may be closed again",
        whole(0),
        group="selection",
        default=0,
    )
    damage: str = setting(
        "measure of damage: auto, mean (the paper's) or rms",
        choice(damage_names),
        group="selection",
        default="auto",
    )
    target_macs: float | None = setting(
        "multiply-adds to end at, as a fraction of the dense network's, such as 0.5",
        optional(check_fraction),
        group="selection",
        default=None,
    )
    target_params: float | None = setting(
        "parameters to end at, as a fraction of the dense network's, such as 0.5; not together "
        "with --target-macs",
        optional(check_fraction),
        group="selection",
        default=None,
    )
    group_lasso: float = setting(
        "for lgc: strength of the group lasso",
        check_non_negative,
        group="selection",
        default=0.0,  # CondenseNet's recipe for CIFAR has none; its recipe for ImageNet has 1e-5
    )
    bn_sparsity: float = setting(
        "for slimming: strength of the L1 penalty on batch norm's scales",
        check_non_negative,
        group="selection",
        default=1e-5,  # network slimming's value for ResNet and DenseNet
    )
    seed: int = setting("seed of all random numbers", seeds, group="aside", default=0)
    data_root: str | None = setting(
        "folder of the data set; no other folder is searched",
        optional(instance(str, "a folder")),
        group="aside",
        default=None,
    )
    subset: int | None = setting(
        "train on this many images (default: all)", optional(whole(1)), default=None
    )
    test_subset: int | None = setting(
        "test on this many images (default: all)", optional(whole(1)), default=None
    )
    image_size: int | None = setting(
        "shrink the images to this height and width; your own images are resized to it (default: "
        "the size of the first one, at most 224)",
        optional(whole(1)),
        default=None,
    )
    holdout: bool = setting(
        "after the last epoch, test on every image that was not trained on; writes holdout.json",
        truth,
        group="aside",
        default=False,
    )
    device: str = setting(
        f"one of {', '.join(DEVICES)}",
        choice(lambda: DEVICES),
        group="aside",
        default="auto",
    )
    precision: str = setting(
        f"one of {', '.join(PRECISIONS)}",
        choice(lambda: PRECISIONS),
        group="aside",
        default="32-true",
    )
    compile: bool = setting(
        "run the network through torch.compile", truth, group="aside", default=False
    )
    channels_last: bool = setting(
        "keep images and weights in channels-last memory order", truth, group="aside", default=True
    )

    def __post_init__(self) -> None:
        for name, declared in declared_settings().items():
            declared.check(name, getattr(self, name))
        self._check_images()
        self._check_method()

    def _check_images(self) -> None:
        """Check that the data set has enough images.

        The user's own images are counted when they are read, so that a run's settings are valid
        on any machine.
        """
        from selectconv.lab.data.read.own_images import own_folder
        from selectconv.lab.data.registry import check_amounts, dataset_info

        if own_folder(self.data) is None:
            check_amounts(dataset_info(self.data, self.image_size), self.subset, self.test_subset)

    def _check_method(self) -> None:
        """Check what the method asks of the other settings."""
        from selectconv.allocate.settings import check_targets

        method = self.method_info
        target = check_targets(self.target_macs, self.target_params)
        if self.gamma == "auto" and target:
            raise ValueError(f"`gamma` auto and `{target[0]}` cannot be combined: give one.")
        if target and not method.has_target:
            able = ", ".join(other.name for other in METHODS.values() if other.has_target)
            raise ValueError(f"`{target[0]}` needs one of the methods {able}; got {self.method!r}.")
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
                f"`stop_at` must be above 0 for {method.name}, which cuts channels at that point; "
                "got 0."
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
        """Return the settings as plain types, in the order in which they are declared."""
        return {
            # In YAML, null is "not given"; where None is a choice, it has a word of its own.
            name: declared.none_word if getattr(self, name) is None else getattr(self, name)
            for name, declared in declared_settings().items()
        }

    @property
    def run_name(self) -> str:
        """A name for the run's folder."""
        data = self.data.removeprefix("imagefolder:").rstrip("/").rpartition("/")[2]
        return as_file_name(f"{self.model}-{data}-{self.method}-{self.seed}")

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


@cache
def declared_settings() -> dict[str, Setting]:
    """Return the declarations of all settings by name, in their order."""
    return {field.name: declaration(field) for field in fields(TrainConfig)}


def setting_names(group: str | None = None) -> list[str]:
    """Return the names of all settings, or of those of one group."""
    return [
        name for name, declared in declared_settings().items() if group in (None, declared.group)
    ]


@cache
def setting_types() -> dict[str, type]:
    """Return the type of each setting's values, None aside: int, float, bool, str or dict."""
    hints = get_type_hints(TrainConfig)
    plain = {name: get_args(hints[name])[0] if type(None) in get_args(hints[name]) else hints[name]
             for name in declared_settings()}  # fmt: skip
    return {name: getattr(kind, "__origin__", kind) for name, kind in plain.items()}


def describe_setting(name: str) -> str:
    """Return a setting's line of help, with its default."""
    recipes = _recipes()
    default = recipes["common"].get(name, _defaults().get(name))
    if default in (None, {}):
        return declared_settings()[name].help
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    shown = shown.lower() if isinstance(default, bool) else shown
    if any(name in part for key in ("data", "model") for part in recipes[key].values()):
        shown = f"the paper's value for the model and data, otherwise {shown}"
    return f"{declared_settings()[name].help} (default: {shown})"


def _defaults() -> dict[str, Any]:
    found = {field.name: default_of(field) for field in fields(TrainConfig)}
    return {name: value for name, value in found.items() if value is not MISSING}


@cache
def _recipes() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(
        (files("selectconv.lab.train") / "recipes.yaml").read_text(encoding="utf-8")
    )
    return content


def check_names(given: Iterable[str]) -> None:
    """Check that these are names of settings.

    Raises:
        ValueError: one is not; the nearest one is named.
    """
    for name in given:
        check_choice("setting", name, setting_names())


def read_recorded(settings: Mapping[str, Any]) -> tuple[TrainConfig, dict[str, Any]]:
    """Read the settings of a recorded run; those that are gone since then come back by name.

    Raises:
        TypeError, ValueError: a value is not accepted.
    """
    known = {name: value for name, value in settings.items() if name in declared_settings()}
    gone = {name: value for name, value in settings.items() if name not in known}
    return resolve(known), gone


def resolve(given: Mapping[str, Any]) -> TrainConfig:
    """Fill in the paper's settings for the pair of model and data set wherever none is given.

    Raises:
        TypeError, ValueError: an unknown setting, or a value that is not accepted.
    """
    check_names(given)
    recipes = _recipes()
    values: dict[str, Any] = {**_defaults(), **recipes["common"]}
    values |= {name: given[name] for name in ("model", "data", "method") if name in given}
    for name in ("model", "data", "method"):
        declared_settings()[name].check(name, values[name])
    # A model's recipe is the more specific one: CondenseNet trains longer than CIFAR's default.
    values |= recipes["data"].get(values["data"], {})
    values |= recipes["model"].get(values["model"], {})
    values |= given
    if values["target_macs"] is None and values["target_params"] is None:
        values["target_macs"] = METHODS[values["method"]].target_macs
    for name, declared in declared_settings().items():
        if declared.none_word is not None and values[name] == declared.none_word:
            values[name] = None
    return TrainConfig(**values)
