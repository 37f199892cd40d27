"""Run folders that look finished, without a training: for tests of what reads them."""

import json
from pathlib import Path

import torch
import yaml

import selectconv as sc
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.checkpoint import dump_weights
from selectconv.lab.train.config import resolve
from selectconv.lab.train.manifest import MANIFEST, write_files
from selectconv.lab.train.network import build_model

SETTINGS = {
    "data": "digits",
    "epochs": 6,
    "subset": 96,
    "test_subset": 40,
    "gamma": 0.3,
    "grace": 1,
    "model_options": {"growth_rate": 4, "units": [2, 2]},
}


def write_run(
    path: Path,
    *,
    error: float = 20.0,
    weights: bool = False,
    holdout: tuple[float, float] | None = None,
    gone: dict[str, object] | None = None,
    **settings: object,
) -> Path:
    """Write a finished run whose error falls to `error`; its allocations are real ones.

    `holdout`: error and loss on the images that were not trained on. `gone`: settings that an older
    version had.
    """
    config = resolve({**SETTINGS, **settings, "holdout": holdout is not None})
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        yaml.safe_dump({**config.to_dict(), **(gone or {})}, sort_keys=False)
    )
    if holdout is not None:
        result = {"images": 1701, "error": holdout[0], "loss": holdout[1]}
        (path / "holdout.json").write_text(json.dumps(result))
    (path / "status.json").write_text('{"status": "done"}')
    versions = {"selectconv": sc.__version__}
    (path / "env.json").write_text(
        json.dumps({"commit": "abc", "dirty": False, "versions": versions})
    )
    torch.manual_seed(config.seed)
    model = build_model(config, dataset_info(config.data, config.image_size))
    allocator = None
    if config.method_info.is_selective:
        allocator = sc.ChannelAllocator(
            model,
            total_epochs=config.epochs,
            gamma=config.gamma,
            grace=config.grace,
            mode=config.method,
            seed=config.seed,
        )
    lines = []
    for epoch in range(config.epochs):
        report = allocator.step(epoch) if allocator is not None else None
        if report:
            with (path / "allocation.jsonl").open("a") as file:
                file.write(json.dumps(report.to_dict()) + "\n")
        layers = [layer for layer in model.modules() if isinstance(layer, sc.SelectConv2d)]
        value = error + 10 * (config.epochs - 1 - epoch)
        lines.append(
            {
                "epoch": epoch,
                "train_loss": value / 20,
                "test_loss": value / 20,
                "test_error": value,
                "lr": 0.1,
                "seconds": 1.5,
                "images_per_second": 100.0,
                "moved": sum(int((layer.moved & layer.gate).sum()) for layer in layers),
                "closed": sum(int((~layer.gate).sum()) for layer in layers),
            }
        )
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if weights:
        (path / "last.safetensors").write_bytes(dump_weights(model))
    return seal(path)


def seal(path: Path) -> Path:
    """Write the manifest of a run's files as they are."""
    (path / MANIFEST).unlink(missing_ok=True)
    names = [entry.name for entry in path.iterdir() if entry.is_file()]
    write_files(path, {name: (path / name).read_bytes() for name in names})
    return path
