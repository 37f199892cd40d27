"""`selectconv compress`: a run's network as a smaller plain model in one file."""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.table import Table

from selectconv.lab.cli.console import print_lines, wide_console
from selectconv.lab.cli.parser import Parser, check_whole
from selectconv.lab.cli.places import check_output
from selectconv.lab.cli.signals import work_begins
from selectconv.lab.train.run_folder import COMPRESSED


def add_arguments(parser: Parser) -> None:
    """Add the verb's options."""
    parser.add_argument("dir", type=str, help="folder of the run")
    parser.add_argument(
        "--out",
        type=str | None,
        default=None,
        help=f"file to write (default: DIR/{COMPRESSED})",
    )
    parser.add_argument(
        "--best", action="store_true", help="use the weights with the lowest test error"
    )
    parser.add_argument(
        "--round-to",
        type=Any,
        default=None,
        help="round the number of channels up to a multiple of this",
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="also measure the speed of the plain, masked, compressed and ONNX models",
    )
    parser.add_argument(
        "--batch-size", type=Any, default=1, help="for --table: images per call (default: 1)"
    )
    parser.add_argument(
        "--repeats",
        type=Any,
        default=7,
        help="for --table: how often to measure each model; the models take turns (default: 7)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line per model")


def run(options: Namespace) -> int:
    """Compress and save the network, and print its cost."""
    if options.round_to is not None:
        check_whole(options, "round_to", 1)
    check_whole(options, "batch_size", 1)
    check_whole(options, "repeats", 1)

    out = check_output(options.out, Path(options.dir) / COMPRESSED)

    import torch

    from selectconv.deploy.compress import compress
    from selectconv.deploy.compressed_file import save_compressed
    from selectconv.lab.train.network import load_run

    work_begins()
    trained = load_run(options.dir, best=options.best)
    model, shape = trained.finished(), trained.info.shape
    example = torch.randn(options.batch_size, *shape, generator=torch.Generator().manual_seed(0))
    small = compress(model, example, round_to=options.round_to)
    save_compressed(small, out)
    rows = _rows(
        trained.plain(), model, small, out, example, options.repeats if options.table else 0
    )
    if options.json:
        return print_lines(rows)
    measured = f" (CPU time, one thread, batches of {options.batch_size})" if options.table else ""
    table = Table(title=f"{out}{measured}")
    table.add_column("model")
    for head in ("parameters", "multiply-adds", "file, kB", "ms per call", "of plain"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['params']:,}",
            f"{row['macs'] / 1e6:,.2f}M",
            "-" if row["file_bytes"] is None else f"{row['file_bytes'] / 1000:,.0f}",
            "-" if row["ms"] is None else f"{row['ms']:.2f}",
            "-" if row["time_ratio"] is None else f"{row['time_ratio']:.2f}",
        )
    console = wide_console(110)
    console.print(table)
    by_name = {row["model"]: row for row in rows}
    if by_name["compressed"]["params"] > by_name["plain"]["params"]:
        console.print(
            "Larger than the plain network, because shifts are stored as small convolutions. "
            "For a smaller network, train with --method dealloc."
        )
    return 0


def _rows(
    plain: Any, model: Any, small: Any, out: Path, example: Any, repeats: int
) -> list[dict[str, Any]]:
    """Describe the three models, and ONNX's where it is measured; `repeats` 0: do not measure."""
    import torch

    from selectconv.deploy.cost import count, count_params

    one = example[:1]
    dense, kept = count(plain, one), count(small, one)
    sizes = {
        "plain": (dense.params, dense.macs, _size_of(plain)),
        # Masked weights are stored and multiplied like the others.
        "masked": (count_params(model), dense.macs, _size_of(model)),
        "compressed": (kept.params, kept.macs, out.stat().st_size),
    }
    runs = {
        name: functools.partial(module, example)
        for name, module in zip(sizes, (plain, model, small), strict=True)
    }
    times: dict[str, list[float]] = {}
    if repeats:
        from selectconv.core.threads import one_thread
        from selectconv.deploy.onnx import export_onnx, open_session
        from selectconv.lab.bench.interleave import in_turn

        with one_thread(), torch.inference_mode():  # CPU time counts every thread
            with tempfile.TemporaryDirectory() as folder:
                file = os.path.join(folder, "model.onnx")
                export_onnx(small, file, example)
                sizes["onnx"] = (kept.params, kept.macs, os.path.getsize(file))
                session = open_session(file)
            runs["onnx"] = functools.partial(session, example)
            times = in_turn(runs, repeats)
    return [
        {
            "model": name,
            "params": params,
            "macs": macs,
            "file_bytes": size,
            **_timing(times, name),
        }
        for name, (params, macs, size) in sizes.items()
    ]


def _timing(times: dict[str, list[float]], name: str) -> dict[str, float | None]:
    import statistics

    from selectconv.lab.bench.interleave import median_ratio

    if not times:
        return {"ms": None, "time_ratio": None}
    return {
        "ms": round(statistics.median(times[name]) * 1000, 4),
        "time_ratio": round(median_ratio(times[name], times["plain"]), 4),
    }


def _size_of(model: Any) -> int:
    from safetensors.torch import save

    tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    return len(save(tensors))
