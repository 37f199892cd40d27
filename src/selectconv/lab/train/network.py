"""A run's network: built as its settings say, written into its folder, and loaded from there.

What a run knows about images that are the user's own is written into its folder: so a trained
network can be loaded, compressed and exported where the images are not, and a run does not go on
with other images than it began with.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from selectconv.core.models import selective_layers
from selectconv.errors import BadValue, RunError, UsageError
from selectconv.graph.convert import convert
from selectconv.graph.example import evaluating
from selectconv.lab.data.image_set import DatasetInfo
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.config import TrainConfig, resolve
from selectconv.lab.train.run_folder import BEST, CHECKPOINT, CONFIG, IMAGES, LAST, RunFolder
from selectconv.lab.zoo import create_model
from selectconv.lab.zoo.external import build_external, is_external
from selectconv.lab.zoo.learned_group_conv import condense

# The options of an external network that are `convert`'s, not the network's.
_OF_CONVERT = ("realloc", "min_channels")
FORMAT = 1  # of checkpoints
_IMAGES = 2  # with which a network is tried
_WORDS = {
    "classes": "classes",
    "num_train": "number of training images",
    "num_test": "number of test images",
    "shape": "shape of the images",
}


def build_model(config: TrainConfig, info: DatasetInfo) -> nn.Module:
    """Build a run's network for the images of a data set, in the run's memory format.

    Raises:
        TypeError, ValueError: the network or one of its options does not exist.
        ConversionError: no conv of an external network can be selective.
    """
    method = config.method_info
    options = {**method.network_options, **config.model_options}
    if is_external(config.model):
        model = _build_external(config, info)
        if method.is_selective:
            of_convert = {name: options[name] for name in _OF_CONVERT if name in options}
            model = convert(model, torch.zeros(1, *info.shape), **of_convert)
    else:
        model = create_model(
            config.model,
            num_classes=info.num_classes,
            in_channels=info.shape[0],
            selective=method.is_selective,
            **{"stem": _stem_for(info), **options},
        )
    return in_layout(model, config)


def build_plain(config: TrainConfig, info: DatasetInfo) -> nn.Module:
    """Build the plain network of the same kind, which a run is compared with."""
    plain = replace(
        config, method="plain", target_macs=None, target_params=None, shifts="learned",
        granularity="slot",
    )  # fmt: skip
    return build_model(plain, info)


def in_layout(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Return the model with its weights in the run's memory format."""
    if config.channels_last:
        # A keyword that torch has and its type stubs do not.
        model = cast(Any, model).to(memory_format=torch.channels_last)
    return model


def _stem_for(info: DatasetInfo) -> str:
    """Return the stem that fits the images: the paper's for 32, 64 and 224 pixels."""
    size = info.shape[1]
    if info.classes:  # the user's own, of any size
        return "cifar" if size < 48 else "tiny" if size < 112 else "imagenet"
    return {"tiny-imagenet": "tiny", "imagenet": "imagenet"}.get(info.name, "cifar")


@dataclass(frozen=True)
class TrainedRun:
    """A run's network with its weights.

    Attributes:
        config: the run's settings.
        info: its data set.
        weights: the file of the weights.
        model: the network as it was trained, in evaluation mode.
    """

    config: TrainConfig
    info: DatasetInfo
    weights: Path
    model: nn.Module

    def finished(self) -> nn.Module:
        """Return the network as it is deployed; learned groups become group convs."""
        return condense(self.model).eval()


def load_run(path: str | Path, *, best: bool = False) -> TrainedRun:
    """Load a run's network with its last or best weights; no data is needed.

    Raises:
        UsageError: the folder is not a run, or has no weights yet.
        RunError: the settings or weights are damaged, or those of another network.
    """
    folder = RunFolder(path)
    config = resolve(folder.read_config())
    weights = folder / (BEST if best else LAST)
    info = run_data(folder.path, config)
    if not weights.exists():
        why = "the run has not finished an epoch yet."
        if best and (folder / LAST).exists():
            why = "a run without test images has no best epoch; leave out --best."
        raise UsageError(f"there is no {weights}: {why}")
    return TrainedRun(config, info, weights, load_network(config, info, weights))


def load_network(config: TrainConfig, info: DatasetInfo, weights: Path) -> nn.Module:
    """Build a run's network, in evaluation mode, with the weights of a file.

    Raises:
        RunError: the file is missing, damaged, or that of another network.
    """
    model = build_model(config, info)
    load_weights(weights, model, slimmed=config.method_info.cuts)
    return in_layout(model, config).eval()


def check_network(config: TrainConfig, info: DatasetInfo) -> None:
    """Run a network from outside the zoo, which is thrown away, on two images.

    It runs as in training and as in testing: some answer differently. No random numbers are used.

    Raises:
        ValueError: it fails, does not answer with one row of class scores per image, or has
            selective layers already.
    """
    if not is_external(config.model):
        return
    with torch.random.fork_rng():
        model = _build_external(config, info)
        if selective_layers(model):
            raise BadValue(
                f"`model` {config.model!r} must return a plain network, got one with selective "
                "layers: leave out sc.convert, since `method` decides what is converted."
            )
        for training in (False, True):
            answer = _run(model.train(training), config, info)
            got = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            if got != (_IMAGES, info.num_classes):
                raise BadValue(
                    f"`model` {config.model!r} must return a tensor (N, {info.num_classes}), one "
                    f"score for each class of {info.name}; for {_IMAGES} images it returned {got}."
                )


def _build_external(config: TrainConfig, info: DatasetInfo) -> nn.Module:
    """Build a network that is not of the zoo, as it comes; lazy modules get their parameters."""
    options = {key: v for key, v in config.model_options.items() if key not in _OF_CONVERT}
    model = build_external(
        config.model, num_classes=info.num_classes, in_channels=info.shape[0], options=options
    )
    if any(isinstance(module, LazyModuleMixin) for module in model.modules()):
        with evaluating(model):
            _run(model, config, info)
    return model


@torch.no_grad()
def _run(model: nn.Module, config: TrainConfig, info: DatasetInfo) -> Any:
    """Run a network on images of zeros."""
    try:
        return model(torch.zeros(_IMAGES, *info.shape))
    except Exception as error:  # of a network that is not ours
        shape = ", ".join(map(str, ("N", *info.shape)))
        raise BadValue(
            f"`model` {config.model!r} must take images of shape ({shape}) and return a tensor "
            f"(N, {info.num_classes}); it fails with {type(error).__name__}: {error}"
        ) from error


def dump_checkpoint(state: Mapping[str, Any]) -> bytes:
    """Return the content of a checkpoint."""
    content = io.BytesIO()
    torch.save({"format": FORMAT, **state}, content)
    return content.getvalue()


def load_checkpoint(folder: RunFolder) -> dict[str, Any]:
    """Read a run's checkpoint.

    Raises:
        RunError: it is damaged, or of another format; it is named and left as it is.
    """
    path = folder.check(CHECKPOINT)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = state["format"]
    except Exception as error:  # a damaged file can fail in any way inside the reader
        # torch's own message suggests weights_only=False, so it is not repeated.
        raise RunError(f"{path} is damaged: it cannot be read ({type(error).__name__}).") from error
    if found != FORMAT:
        raise RunError(f"{path} has format {found!r}; this version reads {FORMAT}.")
    return state


def dump_weights(model: nn.Module) -> bytes:
    """Return a model's state_dict in the format of safetensors."""
    return save(
        {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    )


def load_weights(path: Path, model: nn.Module, *, slimmed: bool = False) -> None:
    """Load a run's file of weights into a model.

    Args:
        path: the file.
        model: the run's network.
        slimmed: channels may have been cut: narrow the model's layers to the file's shapes.

    Raises:
        RunError: the file is missing, damaged, or of another model.
    """
    tensors = load_file(RunFolder(path.parent).check(path.name))
    try:
        if slimmed:
            fit_shapes(model, tensors)
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the model: {str(error).splitlines()[0]}") from error


def fit_shapes(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model's layers, in place, the shapes of a slimmed model's state_dict.

    What changes holds new tensors of unset values, for `load_state_dict` to fill.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear):
            continue
        for key, tensor in module.state_dict().items():
            stored = weights[f"{name}.{key}"]
            if stored.shape != tensor.shape:
                new = torch.empty_like(stored, device=tensor.device)
                setattr(module, key, nn.Parameter(new) if key in module._parameters else new)
        width = len(module.weight)
        if isinstance(module, nn.Conv2d):
            module.out_channels, module.in_channels = width, module.weight.shape[1] * module.groups
        elif isinstance(module, nn.BatchNorm2d):
            module.num_features = width
        else:
            module.out_features, module.in_features = module.weight.shape


def run_data(folder: Path, config: TrainConfig) -> DatasetInfo:
    """Return what is known about a run's data set; no images are needed.

    Raises:
        RunError: the run's own file about it is damaged.
    """
    path = RunFolder(folder).check(IMAGES)
    if not path.exists():
        return dataset_info(config.data, config.image_size, config.data_root)
    content: dict[str, Any] = json.loads(path.read_bytes())
    lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    return DatasetInfo(**{**content, **lists})


def check_same_data(run: RunFolder, data: Mapping[str, str]) -> None:
    """Refuse data that differ from those that a run was trained on, if it recorded a digest.

    Args:
        run: the run that is repeated or resumed.
        data: `name` and `sha256` of the data at hand.

    Raises:
        UsageError: they differ.
    """
    before = run.read_environment().get("data", {})
    if before.get("name") == data["name"] and before != data:
        raise UsageError(
            f"`data`: {data['name']} has other images than the run in {run.path} was trained on: "
            f"restore them, or start another run, with a copy of its {CONFIG} elsewhere. Their "
            f"SHA-256: {data['sha256']}; the run's: {before['sha256']}."
        )


def check_same_images(
    before: DatasetInfo, found: DatasetInfo, *names: str, remedy: str = "start another run"
) -> None:
    """Refuse images that differ from those that a run began with.

    Args:
        before: as the run knows them.
        found: as they are now.
        names: what must be equal besides the classes: attributes of `DatasetInfo`.
        remedy: what else to do than to restore the images.

    Raises:
        UsageError: they differ.
    """
    for name in ("classes", *names):
        old, new = getattr(before, name), getattr(found, name)
        if old != new:
            raise UsageError(
                f"`data`: {found.name} has other images than the run began with: restore them, or "
                f"{remedy}. Its {_WORDS[name]}: {new}; the run's: {old}."
            )
