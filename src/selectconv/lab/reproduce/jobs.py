"""The runs of a grid, each in a process of its own: what is left to do, and doing it.

Two engines do it: `run_local` on this machine, and `run_ray` on a Ray cluster, where Ray places the
runs and restarts those whose worker died.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from selectconv.errors import RunError, UsageError
from selectconv.extras import import_extra
from selectconv.files import write_text
from selectconv.lab.reproduce.grid import PlannedRun
from selectconv.lab.train.config import read_recorded
from selectconv.lab.train.run_folder import CONFIG, RunFolder

RUNS, LOGS = "runs", "logs"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_PATIENCE_S = 10  # for a run to end by itself
# How often Ray restarts a run after its worker or node died; it resumes each time.
_RETRIES = 5
_RAY_POLL_S = 1.0


# Told the name of a run that ended, and why it failed; None: it is done.
Report = Callable[[str, str | None], None]


def find_state(run: PlannedRun, out: Path) -> str:
    """Return whether a run is `done`, can `resume` or is `new`.

    Raises:
        UsageError: its folder holds a run with other settings, or settings that cannot be read.
    """
    folder = RunFolder(out / RUNS / run.name)
    if folder.is_empty() or not (folder / CONFIG).exists():
        return "new"
    try:
        config, gone = read_recorded(folder.read_config())
    except (RunError, TypeError, ValueError) as error:
        raise UsageError(
            f"{error} Delete {folder.path} to run it again, or choose another --out."
        ) from error
    wanted, saved = run.config.to_dict(), {**config.to_dict(), **gone}
    for key, value in saved.items():
        if value != wanted.get(key):
            raise UsageError(
                f"{folder.path} holds a run with {key} {value!r}, wanted {wanted.get(key)!r}: "
                "choose another --out."
            )
    return "done" if folder.status() == "done" else "resume"


def prepare(run: PlannedRun, out: Path) -> list[str]:
    """Write a run's settings and return the command that starts or resumes it."""
    folder = out / RUNS / run.name
    command = [sys.executable, "-m", "selectconv", "train", "--out", str(folder)]
    if find_state(run, out) != "new":  # a run that is done says so, and ends
        return [*command, "--resume"]
    settings = out / LOGS / f"{run.name}.yaml"
    write_text(settings, yaml.safe_dump(run.settings, sort_keys=False))
    more = [] if RunFolder(folder).is_empty() else ["--overwrite"]  # killed before its settings
    return [*command, "--config", str(settings), *more]


def start(
    run: PlannedRun, out: Path, threads: int, gpu: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a run; what it prints goes to its log. `OMP_NUM_THREADS` overrides the threads.

    Args:
        run: the run.
        out: folder of the grid.
        threads: of the run.
        gpu: the only GPU that it may see. None: those that this process may.
    """
    (out / LOGS).mkdir(parents=True, exist_ok=True)
    command = prepare(run, out)
    own = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    with (out / LOGS / f"{run.name}.txt").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(threads), **os.environ, **own},
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )


def _die_with_parent() -> None:
    # Otherwise a run would outlive the process that started it, while its successor resumes it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def find_problem(run: PlannedRun, out: Path, code: int) -> str | None:
    """Return why the process of a run failed, by its exit code and its log; None: it did not."""
    if code == 0:
        return None
    log = (out / LOGS / f"{run.name}.txt").read_text(encoding="utf-8", errors="replace")
    last = (log.strip().splitlines() or ["it said nothing"])[-1].removeprefix("selectconv: ")
    killed = f"killed by signal {-code}; the last line was: " if code < 0 else ""
    return killed + last


def threads_of(jobs: int) -> int:
    """Return the threads of each run when `jobs` runs share the cores."""
    return max(1, (os.cpu_count() or 1) // jobs)


def find_gpus() -> list[str]:
    """Return the GPUs that CUDA sees, by the names that `CUDA_VISIBLE_DEVICES` has for them."""
    import torch  # takes seconds

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def run_local(runs: Sequence[PlannedRun], out: Path, jobs: int, report: Report) -> None:
    """Run them all on this machine, `jobs` at a time, each on the GPU with the fewest runs.

    Args:
        runs: what is left to do.
        out: folder of the grid.
        jobs: processes at a time; the cores are shared out among them.
        report: called when a run has ended.
    """
    waiting = list(runs)
    gpus = find_gpus()
    running: dict[subprocess.Popen[bytes], tuple[PlannedRun, str | None]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                taken = [gpu for _, gpu in running.values()]
                gpu = min(gpus, key=taken.count, default=None)
                running[start(run, out, threads_of(jobs), gpu)] = (run, gpu)
            time.sleep(_POLL_S)
            for process in [one for one in running if one.poll() is not None]:
                run, _ = running.pop(process)
                report(run.name, find_problem(run, out, process.returncode))
    finally:
        # Interrupted runs say so and can be resumed; those that do not listen are ended.
        for process in running:
            process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            process.kill()
            process.wait()


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
            for reference in ray.wait(list(running), timeout=_RAY_POLL_S)[0]:
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
