"""Every CNN of timm that fits: converted, re-allocated, compressed, saved, loaded, ONNX.

`make architectures` goes on where it stopped, and writes soak/ARCHITECTURES.md.
"""

import random
import re
import resource
import signal
import sys
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from soak.driver import CRASHED, HUNG, RESULTS, Ended, Wrong, one_line, results_of
from soak.networks import ALL_THE_WAY, WITHOUT_ONNX, Walk, outputs

LIST = Path(__file__).parent / "timm_networks.txt"
PAGE = Path(__file__).parent / "ARCHITECTURES.md"
COUNT = 400  # of the list, in which the small ones of each family come first
LIMIT_S, CPU_LIMIT_S = 3600, 120  # wall clock, and what counts: a busy machine is no failure
MOST_PARAMS, MOST_BYTES = 50_000_000, 12 << 30
SIDES = (64, 96, 128, 160, 224, 256, 299, 331)
GAMMA = 0.1
TOO_LARGE, TOO_SLOW = "left out: too large", "left out: too slow"
# The modules of timm that hold CNNs, by the names of their files.
FAMILIES = (
    "resnet", "efficientnet", "mobilenetv3", "regnet", "convnext", "densenet", "byobnet",
    "resnetv2", "cspnet", "dla", "dpn", "ghostnet", "hardcorenas", "hgnet", "hrnet",
    "inception_next", "inception_resnet_v2", "inception_v3", "inception_v4", "nasnet", "nfnet",
    "pnasnet", "repghost", "repvit", "res2net", "resnest", "rexnet", "selecsls", "senet", "sknet",
    "starnet", "tresnet", "vgg", "vovnet", "xception", "xception_aligned", "fasternet", "rdnet",
    "mambaout", "convmixer", "lcnetv2", "fastvit", "edgenext",
)  # fmt: skip


@cache
def names() -> list[str]:
    """List the networks as family/name, as far as possible of different kinds and small ones first.

    Results go by a network's place in this list: after writing it anew, they are void.
    """
    return [line.split()[0] for line in LIST.read_text(encoding="utf-8").splitlines()]


def write_list() -> None:
    """Write the list of the networks and their numbers of parameters."""
    import_timm()
    from timm.models import list_models

    sizes = {
        f"{family}/{name}": _num_parameters(f"{family}/{name}")
        for family in FAMILIES
        for name in list_models(module=family, include_tags=False, exclude_filters="test_*")
    }
    lines = [f"{name} {sizes[name]}\n" for name in in_order(sizes)]
    LIST.write_text("".join(lines), encoding="utf-8")


def in_order(sizes: dict[str, int]) -> list[str]:
    """Put networks in order: the first of each family in turn, then the second of each, and so on.

    In a family, those of one kind have names that begin with the same letters. The smallest of
    each kind come first, then the second of each kind.
    """
    kinds: Counter[str] = Counter()
    families: dict[str, list[tuple[int, int, str]]] = {}
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        kind = re.split(r"\d", name)[0]
        families.setdefault(name.partition("/")[0], []).append((kinds[kind], sizes[name], name))
        kinds[kind] += 1
    places = {
        member[2]: place
        for members in families.values()
        for place, member in enumerate(sorted(members))
    }
    return sorted(sizes, key=lambda name: (places[name], sizes[name], name))


def _num_parameters(what: str) -> int:
    with torch.device("meta"):
        return sum(value.numel() for value in create(what).parameters())


def import_timm() -> None:
    """Let timm and torchvision be imported."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    import torchvision_shim

    torchvision_shim.install()


class TooSlow(BaseException):
    """A network has used up its time; no step may take this for an error of its own."""


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Take a network of timm through all steps."""
    return walk(number, scratch, onnx=True)


def walk(number: int, scratch: Path, *, onnx: bool) -> Ended:
    """Take a network of timm through all steps, ONNX too if wanted."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    what = names()[number]
    import_timm()
    size = _num_parameters(what)
    data: dict[str, Any] = {"params": size}
    if size > MOST_PARAMS:
        return Ended(what, TOO_LARGE, f"{size / 1e6:.0f}M parameters", data)
    way = None
    try:
        _limit(CPU_LIMIT_S)
        model = create(what)
        x = find_input(model)
        data["side"] = x.shape[-1]
        way = Walk(model, x, what)
        ended = way.all_the_way(scratch, GAMMA, onnx=onnx)
    except TooSlow:
        ended = Ended(what, TOO_SLOW, f"more than {CPU_LIMIT_S} s", way.row() if way else None)
    except Wrong as wrong:
        ended = Ended(what, wrong.how, wrong.detail, way.row() if way else None)
    finally:
        _limit(0)
    return Ended(what, ended.how, ended.detail, {**data, **(ended.data or {})})


def _limit(seconds: float) -> None:
    """Stop this process's network after its share of CPU time (0: never), and limit its memory."""

    def stop(number: int, frame: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def create(what: str) -> nn.Module:
    """Create a network of timm, named as family/name."""
    import timm

    model: nn.Module = timm.create_model(what.partition("/")[2], num_classes=10)
    return model


def find_input(model: nn.Module) -> torch.Tensor:
    """Return images of the smallest side that the network accepts, trained and tested."""
    config: Any = getattr(model, "default_cfg", {})
    for side in SIDES if not config.get("fixed_input_size") else config["input_size"][-1:]:
        x = torch.randn(2, 3, side, side)
        try:
            outputs(model.train(), x)
            outputs(model.eval(), x)
        except (RuntimeError, ValueError):  # its maps become smaller than its kernels
            continue
        return x
    raise Wrong(type(model).__name__, "no input", f"no square of {SIDES} is accepted")


def describe_steps(seed: int = 0, folder: Path = RESULTS) -> str:
    """Count the networks that passed, by family, and list those that stopped early."""
    # A walk all the way says more than one without ONNX.
    quick = results_of("architectures_quick", seed, folder)
    rows = list((quick | results_of("architectures", seed, folder)).values())
    tried = [row for row in rows if row["how"] not in (TOO_LARGE, TOO_SLOW, CRASHED, HUNG)]
    if not tried:
        return "None has been tried yet."
    counted = Counter(row["how"] for row in rows)
    whole, short = counted[ALL_THE_WAY], counted[WITHOUT_ONNX]
    stopped = [row for row in tried if row["how"] not in (ALL_THE_WAY, WITHOUT_ONNX)]
    share = 100 * (whole + short) / len(tried)
    aside = Counter(row["how"].removeprefix("left out: ") for row in rows if row not in tried)
    families = [_count(family, tried) for family in sorted({_family(row) for row in tried})]
    lines = [
        f"{whole + short} of {len(tried)} networks of timm ({share:.0f} %) passed: {whole} with "
        f"ONNX, {short} without, where ONNX was not tried. {len(stopped)} stopped early."
        + (f" Left out: {', '.join(f'{n} {why}' for why, n in aside.items())}." if aside else ""),
        "",
        f"Passed, by family: {', '.join(families)}.",
    ]
    if stopped:
        lines += ["", "| not all the way | why |", "|---|---|"]
        lines += [
            f"| {row['what']} | {one_line(row['how'] + ': ' + row.get('detail', ''), 100)} |"
            for row in stopped
        ]
    return "\n".join(lines)


def _count(family: str, tried: list[dict[str, Any]]) -> str:
    ends = [row["how"] in (ALL_THE_WAY, WITHOUT_ONNX) for row in tried if _family(row) == family]
    return f"{family} {len(ends)}" if all(ends) else f"{family} {sum(ends)} of {len(ends)}"


def _family(row: dict[str, Any]) -> str:
    return str(row["what"]).partition("/")[0]
