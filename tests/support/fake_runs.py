"""Run folders that look finished, without a training: for tests of what reads them."""

import json
from pathlib import Path

import torch
import yaml

import selectconv as sc
from selectconv.lab.data.registry import dataset_info
from selectconv.lab.train.config import resolve
from selectconv.lab.train.network import build_model, dump_weights
from selectconv.lab.train.run_folder import MANIFEST, RunFolder

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
    environment = {"commit": "abc", "dirty": False, "versions": {"selectconv": sc.__version__}}
    files = {
        "config.yaml": yaml.safe_dump({**config.to_dict(), **(gone or {})}, sort_keys=False),
        "status.json": '{"status": "done"}',
        "env.json": json.dumps(environment),
    }
    if holdout is not None:
        result = {"images": 1701, "error": holdout[0], "loss": holdout[1]}
        files["holdout.json"] = json.dumps(result)
    torch.manual_seed(config.seed)
    info = dataset_info(config.data, config.image_size)
    model = build_model(config, info)
    allocator = None
    if config.method_info.is_selective:
        allocator = sc.ChannelAllocator(
            model,
            total_epochs=config.epochs,
            gamma=config.gamma,
            grace=config.grace,
            mode=config.method,
            seed=config.seed,
            granularity=config.granularity,
            example_input=torch.zeros(1, *info.shape),
        )
        model(torch.randn(8, *info.shape))  # what follows no batch norm is observed
    steps, rows = [], []
    for epoch in range(config.epochs):
        report = allocator.step(epoch) if allocator is not None else None
        if report:
            steps.append(report.to_dict())
        layers = [layer for layer in model.modules() if isinstance(layer, sc.SelectConv2d)]
        value = error + 10 * (config.epochs - 1 - epoch)
        rows.append(
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
    for name, entries in (("allocation.jsonl", steps), ("metrics.jsonl", rows)):
        if entries:
            files[name] = "".join(json.dumps(entry) + "\n" for entry in entries)
    contents = {name: text.encode() for name, text in files.items()}
    if weights:
        contents["last.safetensors"] = dump_weights(model)
    path.mkdir(parents=True)
    RunFolder(path).write(contents)
    return path


def seal(path: Path) -> Path:
    """Write the manifest of a run's files as they are."""
    (path / MANIFEST).unlink(missing_ok=True)
    names = [entry.name for entry in path.iterdir() if entry.is_file()]
    RunFolder(path).write({name: (path / name).read_bytes() for name in names})
    return path
