"""Every CNN of timm that fits: converted, re-allocated, compressed, saved, loaded, ONNX.

`make architectures` goes on where it stopped, and writes the table of docs/convert.md.
"""

import itertools
import random
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

from soak.driver import CRASHED, HUNG, RESULTS, Ended, Wrong, results_of
from soak.networks import Walk, outputs

PAGE = Path(__file__).parents[1] / "docs" / "convert.md"
BEGIN, END = "<!-- begin of the steps -->", "<!-- end of the steps -->"
COUNT = 400  # the small ones of each family come early
LIMIT_S, CPU_LIMIT_S = 3600, 120  # wall clock, and what counts: a busy machine is no failure
FRESH = True  # a process for each network
MOST_PARAMS, MOST_BYTES = 100_000_000, 12 << 30
SIDES = (64, 96, 128, 160, 224, 256, 299, 331)
GAMMA = 0.1
STEPS = ("converted", "re-allocated", "compressed", "loaded", "ONNX")
TOO_LARGE, TOO_SLOW = "left out: too large", "left out: too slow"
# The modules of timm that hold CNNs, by the names of their files.
FAMILIES = (
    "resnet", "efficientnet", "mobilenetv3", "regnet", "convnext", "densenet", "byobnet",
    "resnetv2", "cspnet", "dla", "dpn", "ghostnet", "hardcorenas", "hgnet", "hrnet",
    "inception_next", "inception_resnet_v2", "inception_v3", "inception_v4", "nasnet", "nfnet",
    "pnasnet", "repghost", "repvit", "res2net", "resnest", "rexnet", "selecsls", "senet", "sknet",
    "starnet", "tresnet", "vgg", "vovnet", "xception", "xception_aligned", "fasternet", "rdnet",
    "mambaout",
)  # fmt: skip


@cache
def names() -> list[str]:
    """List the networks as family/name: the first of each family, then the second, and so on."""
    _import_timm()
    from timm.models import list_models

    families = [
        [f"{family}/{name}" for name in list_models(module=family, include_tags=False)]
        for family in FAMILIES
    ]
    rounds = itertools.zip_longest(*families)
    return [name for names in rounds for name in names if name is not None]


def _import_timm() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    import torchvision_shim

    torchvision_shim.install()


class TooSlow(Exception):
    """A network has used up its time."""


def trial(number: int, draw: random.Random, scratch: Path) -> Ended:
    """Take a network of timm through all steps."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    what = names()[number]
    with torch.device("meta"):
        size = sum(value.numel() for value in _create(what).parameters())
    data: dict[str, Any] = {"params": size}
    if size > MOST_PARAMS:
        return Ended(what, TOO_LARGE, f"{size / 1e6:.0f}M parameters", data)
    _limit()
    walk = None
    try:
        model = _create(what)
        x = _find_input(model)
        data["side"] = x.shape[-1]
        walk = Walk(model, x, what)
        ended = walk.all_the_way(scratch, GAMMA)
    except TooSlow:
        done = walk.done if walk else []
        return Ended(what, TOO_SLOW, f"more than {CPU_LIMIT_S} s", {**data, "done": done})
    except Wrong as wrong:
        return Ended(what, wrong.how, wrong.detail, {**data, "done": walk.done if walk else []})
    return Ended(what, ended.how, ended.detail, {**data, **(ended.data or {})})


def _limit() -> None:
    """Stop this process's network after its share of time and of memory."""

    def stop(number: int, frame: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGXCPU, stop)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + CPU_LIMIT_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 60))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def _create(what: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(what.partition("/")[2], num_classes=10)
    return model


def _find_input(model: nn.Module) -> torch.Tensor:
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
    """Return a table with one row per family, and a line for each network that stopped early."""
    rows = list(results_of("architectures", seed, folder).values())
    tried = [row for row in rows if row["how"] not in (TOO_LARGE, TOO_SLOW, CRASHED, HUNG)]
    whole = [row for row in tried if row["how"] == "all the way"]
    if not tried:
        return "None has been tried yet."
    share = 100 * len(whole) / len(tried)
    aside = Counter(row["how"].removeprefix("left out: ") for row in rows if row not in tried)
    left = f" Left out: {', '.join(f'{n} {why}' for why, n in aside.items())}." if aside else ""
    lines = [
        f"{len(tried)} networks of timm were tried; {len(whole)} ({share:.0f} %) went all the way."
        + left,
        "",
        f"| family | tried | {' | '.join(STEPS)} |",
        f"|---|---|{'---|' * len(STEPS)}",
    ]
    families = sorted({row["what"].partition("/")[0] for row in tried})
    for family in families:
        own = [row for row in tried if row["what"].partition("/")[0] == family]
        counts = [sum(step in row.get("done", ()) for row in own) for step in STEPS]
        lines.append(f"| {family} | {len(own)} | {' | '.join(map(str, counts))} |")
    stopped = [row for row in tried if row not in whole]
    if stopped:
        lines += ["", "| not all the way | why |", "|---|---|"]
        lines += [f"| {row['what']} | {_why(row)} |" for row in stopped]
    return "\n".join(lines)


def _why(row: dict[str, Any]) -> str:
    text = " ".join(f"{row['how']}: {row.get('detail', '')}".split()).replace("|", "/")
    return text if len(text) <= 200 else text[:200] + " ..."


def write_page(page: Path = PAGE) -> None:
    """Replace the table of steps in the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{describe_steps()}\n{END}{after}", encoding="utf-8")
