"""`selectconv export`: a run's network as an ONNX file."""

import json
from pathlib import Path

from jsonargparse import Namespace

from selectconv.lab.cli.parser import Parser
from selectconv.lab.cli.places import check_output
from selectconv.lab.cli.signals import work_begins
from selectconv.lab.train.run_folder import ONNX


def add_arguments(parser: Parser) -> None:
    """Add the verb's options."""
    parser.add_argument("dir", type=str, help="folder of the run")
    parser.add_argument(
        "--out", type=str | None, default=None, help=f"file to write (default: DIR/{ONNX})"
    )
    parser.add_argument(
        "--best", action="store_true", help="use the weights with the lowest test error"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line")


def run(options: Namespace) -> int:
    """Export."""
    out = check_output(options.out, Path(options.dir) / ONNX)

    import torch

    from selectconv.deploy.onnx import BATCHES, TOLERANCE, export_onnx
    from selectconv.lab.train.network import load_run

    work_begins()
    trained = load_run(options.dir, best=options.best)
    example = torch.randn(1, *trained.info.shape, generator=torch.Generator().manual_seed(0))
    export_onnx(trained.finished(), out, example)
    if options.json:
        print(json.dumps({"file": str(out), "bytes": out.stat().st_size}))
    else:
        sizes = " and ".join(map(str, BATCHES))
        print(
            f"{out}: {out.stat().st_size / 1000:,.0f} kB, agrees with PyTorch to {TOLERANCE:g} for "
            f"batches of {sizes}"
        )
    return 0
