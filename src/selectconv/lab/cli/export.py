"""`selectconv export`: a run's network as an ONNX file."""

import json
from argparse import Namespace
from pathlib import Path

from selectconv.lab.cli.output import check_file
from selectconv.lab.cli.parser import BEST, DIR, JSON, Argument
from selectconv.lab.train.run_folder import ONNX

EXAMPLES = [
    ("selectconv export runs/first --out first.onnx", "an ONNX file"),
    ("selectconv export runs/first --dynamic size", "one for images of any size"),
]
ARGUMENTS = [
    DIR,
    Argument("--out", f"file to write (default: DIR/{ONNX})", {"metavar": "FILE"}),
    Argument(
        "--dynamic",
        "size: for images of any height and width (default: of the size of the training's)",
        {"metavar": "WHAT"},
    ),
    BEST,
    JSON,
]


def run(options: Namespace) -> None:
    """Export."""
    out = Path(options.dir) / ONNX if options.out is None else check_file(options.out)

    import torch

    from selectconv.deploy.onnx import BATCHES, TOLERANCE, export_onnx
    from selectconv.lab.train.network import load_run

    trained = load_run(options.dir, best=options.best)
    example = torch.randn(1, *trained.info.shape, generator=torch.Generator().manual_seed(0))
    out.parent.mkdir(parents=True, exist_ok=True)
    export_onnx(trained.finished(), out, example, dynamic=options.dynamic)
    size, batches = out.stat().st_size, " and ".join(map(str, BATCHES))
    words = (
        f"{out}: {size / 1000:,.0f} kB, agrees with PyTorch to {TOLERANCE:g} for batches of "
        f"{batches}{' and two sizes of images' if options.dynamic else ''}\n"
        f"next: onnxruntime.InferenceSession({str(out)!r}) in Python, or, to compare sizes and "
        f"times: selectconv compress {options.dir} --table"
    )
    print(json.dumps({"file": str(out), "bytes": size}) if options.json else words)
