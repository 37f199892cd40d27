"""Convert networks of timm and torchvision, and list what became of their convs.

`make architectures` runs it; both packages come with `selectconv[test]`.
"""

import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

import selectconv as sc
from soak.architectures import PAGE, import_timm
from soak.driver import fill_page

IMAGE, LARGE_IMAGE, VIDEO = (1, 3, 224, 224), (1, 3, 299, 299), (1, 3, 8, 112, 112)

TORCHVISION = {
    "resnet50": IMAGE, "resnext50_32x4d": IMAGE, "densenet121": IMAGE, "inception_v3": LARGE_IMAGE,
    "squeezenet1_1": IMAGE, "vgg11_bn": IMAGE, "mobilenet_v2": IMAGE, "efficientnet_b0": IMAGE,
    "shufflenet_v2_x1_0": IMAGE, "convnext_tiny": IMAGE, "segmentation.fcn_resnet50": IMAGE,
    "video.r2plus1d_18": VIDEO,
}  # fmt: skip
TIMM = (
    "resnetv2_50", "seresnet18", "xception41", "mobilenetv3_small_050", "regnety_002",
    "hrnet_w18_small", "repvgg_a0", "dla34", "ghostnet_050", "cspresnet50", "res2net50_26w_4s",
    "nf_resnet26",
)  # fmt: skip


def networks() -> list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    """List the networks: a name, how to build one, and the shape of its input."""
    import timm
    import torchvision

    def of_torchvision(name: str) -> nn.Module:
        place, _, last = name.rpartition(".")
        models = getattr(torchvision.models, place) if place else torchvision.models
        options = {"weights_backbone": None} if place == "segmentation" else {}
        model: nn.Module = getattr(models, last)(weights=None, **options)
        return model

    return [
        *(
            (f"torchvision {name}", lambda name=name: of_torchvision(name), shape)
            for name, shape in TORCHVISION.items()
        ),
        *((f"timm {name}", lambda name=name: timm.create_model(name), IMAGE) for name in TIMM),
    ]


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return what a network computes in evaluation mode."""
    with torch.no_grad():
        y = model.eval()(x)
    return y["out"] if isinstance(y, dict) else y


def row(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> str:
    """Convert a network and sum up its convs as a row of the table."""
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    before = outputs(model, x)
    model.train()  # convs of training alone are shown too
    try:
        sc.convert(model, x)
    except sc.ConversionError as error:
        print(f"{name}: {error}")
    assert torch.allclose(outputs(model, x), before, rtol=1e-5, atol=1e-7), name
    convs = sc.describe(model)
    observed = sum(conv.source == "observed" for conv in convs)
    skipped = Counter(short(conv.skipped) for conv in convs[1:] if conv.skipped)
    why = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common()) or "-"
    closed_form = len(convs[1:]) - observed - skipped.total()
    return f"| {name} | {len(convs)} | {closed_form} | {observed} | {why} |"


def short(reason: str) -> str:
    """Shorten a reason of `describe`."""
    if "fewer than min_channels" in reason:
        return "with fewer than 8 inputs"
    if reason.startswith("a subclass"):
        return f"of a subclass {reason[reason.index('(') : reason.index(')') + 1]}"
    return {
        "works on 1x1 maps only: nothing to shift": "on 1x1 maps",
        "fed with raw input": "on raw input",
    }.get(reason, reason)


def main() -> None:
    """Rewrite the table of soak/ARCHITECTURES.md."""
    import_timm()
    warnings.simplefilter("ignore")  # about the initialisation of weights, by torchvision
    head = "| network | convs | closed form | observed | left plain |\n|---|---|---|---|---|"
    fill_page(PAGE, "table", "\n".join([head, *(row(*network) for network in networks())]))


if __name__ == "__main__":
    main()
