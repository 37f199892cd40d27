"""`selectconv reproduce`: the runs of a table of the paper, the table, and a report."""

from argparse import Namespace
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from selectconv.checks import check_choice, check_non_negative
from selectconv.errors import RunError, UsageError
from selectconv.lab.cli.output import check_folder, print_rows
from selectconv.lab.cli.parser import Argument, count, switch
from selectconv.lab.reproduce.grid import TABLES, Grid, PlannedRun, load_grid
from selectconv.lab.reproduce.jobs import (
    LOGS,
    RUNS,
    find_state,
    import_ray,
    run_local,
    run_ray,
    threads_of,
)
from selectconv.lab.train.run_folder import RunFolder, locked
from selectconv.tables import counted

EXAMPLES = [
    ("selectconv reproduce ablation", "check in a few minutes that everything runs"),
    ("selectconv reproduce table1 --scale full --dry-run", "how long the paper's runs would take"),
    ("selectconv reproduce ablation --scale reduced --jobs 2", "hours, two runs at a time"),
    (
        "selectconv reproduce table1 --scale reduced --only 'densenet40-cifar10-*'",
        "one row of the table",
    ),
]
ENGINES = ("local", "ray")
ARGUMENTS = [
    Argument("table", f"one of {', '.join(TABLES)}"),
    Argument(
        "--scale",
        "full (the paper), reduced (hours on a small machine) or smoke (minutes, the default)",
        {"default": "smoke"},
    ),
    Argument(
        "--only",
        "only runs whose names match, such as 'densenet40-cifar10-*' for one row of a table; "
        "--dry-run lists the names (default: all)",
        {"metavar": "GLOB"},
    ),
    Argument("--engine", "local, or ray for a Ray cluster (default: local)", {"default": "local"}),
    count("--jobs", "number of runs at a time (default: 1)", 1),
    Argument("--gpus-per-run", "for ray: GPUs per run", {"metavar": "N", "type": float}),
    Argument("--out", "folder to write into (default: reproduce/TABLE-SCALE)", {"metavar": "DIR"}),
    switch(
        "--no-run", "train nothing; write the tables and the page of the runs that are finished"
    ),
    switch(
        "--time",
        "train nothing; measure each row's deployed network in ONNX Runtime beside the plain one, "
        "then write the tables, which show the times from then on",
    ),
    switch("--dry-run", "list the runs and how long they would take, and stop"),
]


def run(options: Namespace) -> None:
    """Carry out the runs of a grid, and write its tables."""
    grid = load_grid(options.table, options.scale)
    chosen = tuple(run for run in grid.runs if fnmatchcase(run.name, options.only or "*"))
    if not chosen:
        raise UsageError(
            f"`only` {options.only!r} matches no run of {grid.table}, {grid.scale}: names are like "
            f"{grid.runs[0].name}, and * stands for any characters; --dry-run lists the names."
        )
    check_choice("engine", options.engine, ENGINES)
    if options.gpus_per_run is not None:
        check_non_negative("gpus_per_run", options.gpus_per_run)
    default = Path("reproduce") / f"{grid.table}-{grid.scale}"
    out = check_folder(default if options.out is None else options.out)
    if options.dry_run and (options.no_run or options.time):
        raise UsageError(
            "--dry-run cannot be combined with --no-run or --time: list the runs, or write the "
            "tables."
        )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if options.no_run or options.time:
        with locked(out):
            write_report(grid, out, {}, console, time=options.time)
    elif options.dry_run:
        show_plan(grid, chosen, out, options.jobs, console)
    else:
        run_grid(
            grid,
            out,
            chosen=chosen,
            jobs=options.jobs,
            console=console,
            engine=options.engine,
            gpus_per_run=options.gpus_per_run,
        )


def run_grid(
    grid: Grid,
    out: Path,
    *,
    jobs: int,
    console: Console,
    chosen: tuple[PlannedRun, ...] | None = None,
    engine: str = "local",
    gpus_per_run: float | None = None,
) -> None:
    """Carry out the runs that are not done yet, and write the tables.

    Args:
        grid: the runs.
        out: folder of the grid; one process at a time works there.
        jobs: runs at a time.
        console: where progress is shown.
        chosen: those of the grid's runs that are carried out; None: all.
        engine: one of `ENGINES`.
        gpus_per_run: for ray.

    Raises:
        UsageError: another process works in `out`, or a folder holds a run with other settings.
        RunError: a run failed.
        KeyboardInterrupt: the user interrupted; the tables of what is finished are written.
    """
    from selectconv.lab.cli.display import build_bar  # imports torch

    if engine == "ray":
        import_ray()  # before the folder is made
    chosen = grid.runs if chosen is None else chosen
    with locked(out), build_bar(console, "runs") as bar:
        left = [run for run in chosen if find_state(run, out) != "done"]
        console.print(f"{grid.title}. {grid.note}")
        console.print(f"{counted(len(chosen), 'run')}, {len(chosen) - len(left)} done; {out}")
        if len(chosen) < len(grid.runs):
            console.print(f"chosen: {', '.join(run.name for run in chosen)}")
        problems: dict[str, str] = {}
        task = bar.add_task("", total=len(left))

        def tell(name: str, problem: str | None) -> None:
            bar.advance(task)
            if problem is not None:
                problems[name] = problem
            console.print(f"{name} done" if problem is None else f"{name} failed: {problem}")

        try:
            if engine == "ray":
                run_ray(left, out, jobs, tell, gpus_per_run=gpus_per_run)
            else:
                run_local(left, out, jobs, tell)
        except KeyboardInterrupt:
            console.print("interrupted: writing the tables of the finished runs")
            write_report(grid, out, problems, console)
            raise KeyboardInterrupt(
                "interrupted; the same command continues where it stopped."
            ) from None
        known = write_report(grid, out, problems, console)
    failed = [run.name for run in chosen if run.name in known]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(chosen)} runs failed: {', '.join(failed)}; their output is in "
            f"{out / LOGS}. To try again, run the same command. To repeat a run that is done but "
            "damaged, delete its folder first."
        )


def write_report(
    grid: Grid, out: Path, problems: dict[str, str], console: Console, *, time: bool = False
) -> dict[str, str]:
    """Write the grid's tables and its page from what is finished.

    Returns:
        Why runs are missing that failed, or are done but damaged, by name.
    """
    from selectconv.lab.report.collect import collect
    from selectconv.lab.report.page import build_report

    found = collect([out / RUNS])
    planned = {run.name for run in grid.runs}
    damaged = {
        path.name: reason
        for path, reason in found.left_out.items()
        if path.name in planned and RunFolder(path).status() == "done"
    }
    for name, why in damaged.items():
        console.print(f"{name} is done but cannot be reported: {why}")
    known = damaged | problems
    for path in build_report(found, grid, known, time=time).write(out):
        console.print(f"wrote {path}")
    console.print(
        f"next: open {out / 'report.html'} in a browser; {out / 'tables.md'} says it in words"
    )
    return known


def show_plan(
    grid: Grid, chosen: Sequence[PlannedRun], out: Path, jobs: int, console: Console
) -> None:
    """Print the chosen runs of a grid with the time that they will take."""
    from selectconv.lab.train.estimate import describe_duration, estimate_seconds

    states = {run.name: find_state(run, out) for run in chosen}
    seconds = estimate_seconds({run.name: run.config for run in chosen}, threads_of(jobs))
    console.print(f"{grid.title}. {grid.note}")
    print_rows(
        [
            {"run": name, "state": state, "takes about": describe_duration(seconds[name])}
            for name, state in states.items()
        ]
    )
    left = sum(seconds[name] for name in seconds if states[name] != "done") / jobs
    console.print(
        f"{counted(len(chosen), 'run')} into {out}, {jobs} at a time on this machine: "
        f"about {describe_duration(left)}"
    )
