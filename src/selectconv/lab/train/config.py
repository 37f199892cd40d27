"""What a run is: one flat set of settings, the same words in YAML, flags and `config.yaml`.

Each setting is declared once, as a field of `TrainConfig`: its flag, help, checks and place in a
report follow from it. The paper's values, for the pair of model and data set, are in
`recipes.yaml`. Importing this file does not import torch, so that `selectconv train --help` is
quick: names that live beside networks and data are imported when a value is checked.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from importlib.resources import files
from typing import Any, Literal, get_args, get_type_hints

import yaml

from selectconv.checks import (
    check_choice,
    check_count,
    check_flag,
    check_fraction,
    check_gamma,
    check_non_negative,
    check_path,
    check_seed,
    check_share,
)
from selectconv.errors import BadType, BadValue
from selectconv.lab.train.methods import METHODS, MethodInfo

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
# `core.layer` has these, too, and imports torch.
DAMAGES = ("auto", "mean", "rms")

# What a setting belongs to: the network and the data; the training; what each row of a comparison
# may have its own best value of; how channels are selected, likewise; nothing that a result depends
# on by intention.
Group = Literal["task", "training", "tuning", "selection", "aside"]


def setting(
    help: str,
    check: Callable[[str, Any], object] | None,
    *,
    group: Group = "training",
    **default: Any,
) -> Any:
    """Declare a field of `TrainConfig`; without a default, `recipes.yaml` must have a value.

    Args:
        help: one line for `--help`, without the default.
        check: called with the name and a value; raises TypeError or ValueError. A value None is
            accepted where the type says so. None: `TrainConfig` itself checks it.
        group: what it belongs to.
        default: `default` or `default_factory` of `dataclasses.field`.
    """
    return field(metadata={"help": help, "check": check, "group": group}, **default)


_at_least_one = partial(check_count, minimum=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All that is needed to repeat a run; `selectconv train --help` explains the settings."""

    model: str = setting(
        "the network: a name from `selectconv models`, timm:NAME, or package.module:function, "
        "a function that is called with num_classes and in_channels",
        None,
        group="task",
        default="densenet40",
    )
    model_options: dict[str, Any] = setting(  # noqa: RUF009 - makes a field
        "options of the network, such as '{growth_rate: 8, units: [3, 3, 3]}'; for networks that "
        "are not from `selectconv models`, also `realloc` and `min_channels` of `sc.convert`",
        None,
        group="task",
        default_factory=dict,
    )
    data: str = setting(
        "the data set: a name from `selectconv data list`, or imagefolder:DIR for your own images, "
        "where DIR has train/ and test/, each with one folder per class",
        None,
        group="task",
        default="cifar10",
    )
    method: str = setting(
        f"one of {', '.join(METHODS)}; select is the paper's method, dealloc only closes channels, "
        "plain changes nothing",
        partial(check_choice, choices=METHODS),
        group="aside",
        default="select",
    )
    epochs: int = setting("number of passes over the training set", _at_least_one)
    batch_size: int = setting("images per step, over all processes", _at_least_one)
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
        _at_least_one,
        group="selection",
    )
    max_copies: int | None = setting(
        "N_max: largest number of copies of a channel, or none for no limit",
        _at_least_one,
        group="selection",
    )
    stop_at: float = setting(
        "first part of the training in which channels are de- and re-allocated, from 0 to 1",
        check_fraction,
        group="selection",
    )
    grace: int = setting(
        "epochs before a re-opened slot may be closed again",
        partial(check_count, minimum=0),
        group="selection",
        default=0,
    )
    damage: str = setting(
        "measure of damage: auto, mean (the paper's) or rms",
        partial(check_choice, choices=DAMAGES),
        group="selection",
        default="auto",
    )
    shifts: str = setting(
        "shifts of re-opened slots: learned (the paper's), or whole: distinct whole pixels, not "
        "trained, and free when deployed",
        partial(check_choice, choices=("learned", "whole")),
        group="selection",
        default="learned",
    )
    target_macs: float | None = setting(
        "multiply-adds to end at, as a fraction of the dense network's, such as 0.5",
        check_share,
        group="selection",
        default=None,
    )
    target_params: float | None = setting(
        "parameters to end at, as a fraction of the dense network's, such as 0.5; not together "
        "with --target-macs",
        check_share,
        group="selection",
        default=None,
    )
    granularity: str = setting(
        "what de-allocation closes: slot (the paper: an input of one layer) or filter (a channel "
        "in all its readers; for dealloc)",
        partial(check_choice, choices=("slot", "filter")),
        group="selection",
        default="slot",
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
    seed: int = setting("seed of all random numbers", check_seed, group="aside", default=0)
    data_root: str | None = setting(
        "folder of the data set; no other folder is searched",
        check_path,
        group="aside",
        default=None,
    )
    subset: int | None = setting(
        "train on this many images (default: all)", _at_least_one, default=None
    )
    test_subset: int | None = setting(
        "test on this many images (default: all)", _at_least_one, default=None
    )
    image_size: int | None = setting(
        "shrink the images to this height and width; your own images are resized to it (default: "
        "the size of the first one, at most 224)",
        _at_least_one,
        default=None,
    )
    holdout: bool = setting(
        "after the last epoch, test on every image that was not trained on; writes holdout.json",
        check_flag,
        group="aside",
        default=False,
    )
    device: str = setting(
        f"one of {', '.join(DEVICES)}",
        partial(check_choice, choices=DEVICES),
        group="aside",
        default="auto",
    )
    precision: str = setting(
        f"one of {', '.join(PRECISIONS)}",
        partial(check_choice, choices=PRECISIONS),
        group="aside",
        default="32-true",
    )
    compile: bool = setting(
        "run the network through torch.compile", check_flag, group="aside", default=False
    )
    channels_last: bool = setting(
        "keep images and weights in channels-last memory order",
        check_flag,
        group="aside",
        default=True,
    )

    def __post_init__(self) -> None:
        for name, declared in _DECLARED.items():
            value, check = getattr(self, name), declared["check"]
            if check and (value is not None or type(None) not in get_args(_HINTS[name])):
                check(name, value)
        from selectconv.lab.data import registry
        from selectconv.lab.zoo.external import check_model_name

        check_model_name(self.model)
        if not isinstance(self.model_options, dict):
            raise BadType(
                "`model_options` must be a mapping such as {growth_rate: 8}, got "
                f"{self.model_options!r}."
            )
        # The user's own images are counted when they are read: settings are valid on any machine.
        if registry.check_dataset_name(self.data) in registry.list_datasets():
            info = registry.dataset_info(self.data, self.image_size)
            registry.check_amounts(info, self.subset, self.test_subset)
        self._check_method()

    def _check_method(self) -> None:
        """Check what the method asks of the other settings."""
        from selectconv.allocate.settings import check_targets

        method = self.method_info
        target = check_targets(self.target_macs, self.target_params)
        if self.gamma == "auto" and target:
            raise BadValue(f"`gamma` auto and `{target[0]}` cannot be combined: give one.")
        if target and target[0] not in method.uses:
            able = ", ".join(name for name, other in METHODS.items() if target[0] in other.uses)
            raise BadValue(f"`{target[0]}` needs one of the methods {able}; got {self.method!r}.")
        if self.granularity == "filter" and self.method != "dealloc":
            raise BadValue(f"`granularity` filter needs `method` dealloc, got {self.method!r}.")
        if self.shifts == "whole" and "shifts" not in method.uses:
            raise BadValue(f"`shifts` whole goes with `method` select only, got {self.method!r}.")
        if method.needs_model not in (None, self.model):
            raise BadValue(
                f"`method` {method.name} needs `model` {method.needs_model}, got {self.model!r}."
            )
        if method.has_penalty and self.precision == "16-mixed":
            raise BadValue(
                f"`method` {method.name} adds its penalty to unscaled gradients: `precision` must "
                "be 32-true or bf16-mixed, got '16-mixed'."
            )
        if method.cuts and self.stop_at == 0:
            raise BadValue(
                f"`stop_at` must be above 0 for {method.name}, which cuts channels at that point; "
                "got 0."
            )

    @property
    def method_info(self) -> MethodInfo:
        """The method's row in the table of methods."""
        return METHODS[self.method]

    @property
    def run_name(self) -> str:
        """A name for the run's folder."""
        data = self.data.removeprefix("imagefolder:").rstrip("/").rpartition("/")[2]
        return as_file_name(f"{self.model}-{data}-{self.method}-{self.seed}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain types, in the order in which they are declared."""
        values = {name: getattr(self, name) for name in setting_names()}
        # In YAML, null is "not given"; where None is a choice, it is written as a word.
        return {**values, "max_copies": "none" if self.max_copies is None else self.max_copies}

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


_DECLARED = {declared.name: declared.metadata for declared in fields(TrainConfig)}
_HINTS = get_type_hints(TrainConfig)


def setting_names(group: str | None = None) -> list[str]:
    """Return the names of all settings, or of those of one group."""
    return [name for name in _DECLARED if group in (None, _DECLARED[name]["group"])]


def setting_types() -> dict[str, type]:
    """Return the type of each setting's values, None aside: int, float, bool, str or dict."""
    plain = {
        name: get_args(hint)[0] if type(None) in get_args(hint) else hint
        for name, hint in _HINTS.items()
    }
    return {name: getattr(kind, "__origin__", kind) for name, kind in plain.items()}


def describe_setting(name: str) -> str:
    """Return a setting's line of help, with its default."""
    help, default = _DECLARED[name]["help"], _defaults()[name]
    if default in (None, {}):
        return str(help)
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    shown = shown.lower() if isinstance(default, bool) else shown
    if any(name in part for key in ("data", "model") for part in _recipes()[key].values()):
        shown = f"the paper's value for the model and data, otherwise {shown}"
    return f"{help} (default: {shown})"


def _defaults() -> dict[str, Any]:
    """Return the settings of a run for which nothing is given, and no recipe says more."""
    own = {declared.name: declared.default for declared in fields(TrainConfig)}
    return {**own, "model_options": {}, **_recipes()["common"]}


@cache
def _recipes() -> dict[str, Any]:
    text = (files("selectconv.lab.train") / "recipes.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def read_recorded(settings: Mapping[str, Any]) -> tuple[TrainConfig, dict[str, Any]]:
    """Read the settings of a recorded run; those that are gone since then come back by name.

    Raises:
        TypeError, ValueError: a value is not accepted.
    """
    gone = {name: value for name, value in settings.items() if name not in setting_names()}
    return resolve({name: settings[name] for name in settings if name not in gone}), gone


def resolve(given: Mapping[str, Any]) -> TrainConfig:
    """Fill in the paper's settings for the pair of model and data set wherever none is given.

    Raises:
        TypeError, ValueError: an unknown setting, or a value that is not accepted.
    """
    for name in given:
        check_choice("setting", name, setting_names())
    recipes, values = _recipes(), {**_defaults(), **given}
    # A model's recipe is the more specific one: CondenseNet trains longer than CIFAR's default.
    values |= recipes["data"].get(str(values["data"]), {})
    values |= recipes["model"].get(str(values["model"]), {})
    values |= given
    method = METHODS.get(str(values["method"]))  # None: refused below
    if method and values["target_macs"] is None and values["target_params"] is None:
        values["target_macs"] = method.target_macs
    if values["max_copies"] == "none":
        values["max_copies"] = None
    return TrainConfig(**values)
