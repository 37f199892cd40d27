"""The engine for a Ray cluster: Ray places the runs and restarts those whose worker died.

The folder of the grid must be one that every node sees.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selectconv.errors import RunError, UsageError
from selectconv.extras import import_extra
from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.reproduce.jobs import Report, find_problem, start

# How often a run is restarted after its worker or node died; it resumes each time.
_RETRIES = 5
_POLL_S = 1.0


def run_ray(
    runs: Sequence[PlannedRun],
    out: Path,
    jobs: int,
    report: Report,
    *,
    gpus_per_run: float | None = None,
) -> None:
    """Run them all on the cluster of `RAY_ADDRESS`, or on a Ray of this machine.

    Args:
        runs: what is left to do.
        out: folder of the grid, which every node sees.
        jobs: runs at a time.
        report: called when a run has ended.
        gpus_per_run: GPUs that Ray reserves for a run. None: one if the cluster has any.

    Raises:
        RunError: Ray is not installed, or the cluster has fewer GPUs than a run needs.
    """
    ray = import_ray()
    is_own = not ray.is_initialized()
    if is_own:
        local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": jobs}
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, **local)
    try:
        gpus = float(ray.cluster_resources().get("GPU", 0))
        wanted = min(1.0, gpus) if gpus_per_run is None else gpus_per_run
        if wanted > gpus:
            raise RunError(f"a run needs {wanted:g} GPUs; the cluster has {gpus:g}.")
        task = ray.remote(num_cpus=1, num_gpus=wanted, max_retries=_RETRIES)(_run_one)
        waiting, running = list(runs), dict[Any, PlannedRun]()
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                named = task.options(name=run.name)
                running[named.remote(asdict(run), str(out.absolute()))] = run
            for reference in ray.wait(list(running), timeout=_POLL_S)[0]:
                report(running.pop(reference).name, _result(ray, reference))
    finally:
        if is_own:
            ray.shutdown()


def import_ray() -> Any:
    """Return the package, whose types are partly missing.

    Raises:
        UsageError: it is not installed.
    """
    return import_extra("ray", "`--engine ray`", "selectconv[ray]", error=UsageError)


def _run_one(run: dict[str, Any], out: str) -> str | None:
    # Runs in a worker: a process of its own still, so that a crash takes no worker with it.
    planned = PlannedRun(**run)
    code = start(planned, Path(out), threads=1).wait()
    return find_problem(planned, Path(out), code)


def _result(ray: Any, reference: Any) -> str | None:
    try:
        problem: str | None = ray.get(reference)
    except ray.exceptions.RayError as error:
        # A traceback, in colours; its last line says what happened.
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
        problem = f"Ray gave up: {plain.splitlines()[-1].strip()}"
    return problem
