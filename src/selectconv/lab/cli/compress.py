"""`selectconv compress`: a run's network as a smaller plain model in one file."""

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from selectconv.lab.cli.output import check_file, print_rows
from selectconv.lab.cli.parser import BEST, DIR, JSON, Argument, count, switch
from selectconv.lab.train.run_folder import COMPRESSED

EXAMPLES = [
    ("selectconv compress runs/first", "write runs/first/compressed.safetensors"),
    ("selectconv compress runs/first --table", "also compare its speed with the plain network's"),
]
ARGUMENTS = [
    DIR,
    Argument("--out", f"file to write (default: DIR/{COMPRESSED})", {"metavar": "FILE"}),
    BEST,
    count("--round-to", "round the number of channels up to a multiple of this"),
    switch("--table", "also measure the speed of the plain, masked, compressed and ONNX models"),
    count("--batch-size", "for --table: images per call (default: 1)", 1),
    count(
        "--repeats",
        "for --table: how often to measure each model; the models take turns (default: 7)",
        7,
    ),
    JSON,
]


def run(options: Namespace) -> None:
    """Compress and save the network, and print its cost."""
    out = Path(options.dir) / COMPRESSED if options.out is None else check_file(options.out)

    import torch

    from selectconv.deploy.compress import compress
    from selectconv.deploy.compressed_file import save_compressed
    from selectconv.deploy.cost import count, count_params
    from selectconv.lab.train.network import build_plain, dump_weights, load_run

    trained = load_run(options.dir, best=options.best)
    plain, model = build_plain(trained.config, trained.info).eval(), trained.finished()
    example = torch.randn(
        options.batch_size, *trained.info.shape, generator=torch.Generator().manual_seed(0)
    )
    small = compress(model, example, round_to=options.round_to)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_compressed(small, out)
    dense, kept = count(plain, example[:1]), count(small, example[:1])
    rows: list[dict[str, Any]] = [
        {"model": name, "params": params, "macs": macs, "file_bytes": size}
        for name, params, macs, size in (
            ("plain", dense.params, dense.macs, len(dump_weights(plain))),
            # Masked weights are stored and multiplied like the others.
            ("masked", count_params(model), dense.macs, len(dump_weights(model))),
            ("compressed", kept.params, kept.macs, out.stat().st_size),
        )
    ]
    if options.table:
        rows.append({**rows[-1], "model": "onnx"})
        _measure(rows, (plain, model, small), example, options.repeats)
    print_rows(rows, as_json=options.json)
    if not options.json:
        times = f" (batches of {options.batch_size}, CPU time on one thread, models in turn)"
        print(f"wrote {out}{times if options.table else ''}")
        if kept.params >= dense.params:
            print(
                "No smaller than the plain network"
                f"{', because shifts are small convs' if kept.params > dense.params else ''}"
                ": train with --method dealloc for that."
            )
        print(f"next: sc.load_compressed({str(out)!r}) in Python; selectconv export {options.dir}")


def _measure(
    rows: list[dict[str, Any]], networks: Sequence[Any], example: Any, repeats: int
) -> None:
    """Add the time of each model, and its ratio to the plain one's."""
    import torch

    from selectconv.core.threads import num_threads
    from selectconv.deploy.onnx import export_onnx, open_session
    from selectconv.lab.bench.timing import in_turn, ratios

    with num_threads(1), torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        export_onnx(networks[-1], file, example)
        rows[-1]["file_bytes"] = file.stat().st_size
        calls = [partial(run, example) for run in (*networks, open_session(file))]
        sides = {row["model"]: call for row, call in zip(rows, calls, strict=True)}
        times = in_turn(sides, repeats)
    for row in rows:
        own = times[row["model"]]
        row["ms"] = round(statistics.median(own) * 1000, 4)
        row["time_ratio"] = round(statistics.median(ratios(own, times["plain"])), 4)
