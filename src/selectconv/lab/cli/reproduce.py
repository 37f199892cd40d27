"""`selectconv reproduce`: the runs of a table of the paper, the table, and a report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.console import Console
from rich.table import Column, Table

from selectconv.checks import check_choice, check_non_negative
from selectconv.errors import RunError, UsageError
from selectconv.lab.cli.parser import Parser, check_whole
from selectconv.lab.cli.places import check_folder
from selectconv.lab.cli.signals import work_begins
from selectconv.lab.reproduce.grid import TABLES, Grid, PlannedRun, load_grid
from selectconv.lab.reproduce.jobs import LOGS, RUNS, Outcome, find_state
from selectconv.lab.reproduce.local_engine import run_local
from selectconv.lab.train.folder_lock import locked
from selectconv.lab.train.run_folder import RunFolder
from selectconv.tables import counted

ENGINES = ("local", "ray")


def add_arguments(parser: Parser) -> None:
    """Add the verb's options."""
    parser.add_argument("table", type=str, help=f"one of {', '.join(TABLES)}")
    parser.add_argument(
        "--scale",
        type=str,
        default="smoke",
        help="full (the paper), reduced (hours on a small machine) or smoke (minutes, the default)",
    )
    parser.add_argument(
        "--only",
        type=str | None,
        default=None,
        help="only runs whose names match, such as 'densenet40-cifar10-*' for one row of a table; "
        "--dry-run lists the names (default: all)",
    )
    parser.add_argument(
        "--engine",
        type=str,
        default="local",
        help="local, or ray for a Ray cluster (default: local)",
    )
    parser.add_argument("--jobs", type=Any, default=1, help="number of runs at a time (default: 1)")
    parser.add_argument("--gpus-per-run", type=Any, default=None, help="for ray: GPUs per run")
    parser.add_argument(
        "--out",
        type=str | None,
        default=None,
        help="folder to write into (default: reproduce/TABLE-SCALE)",
    )
    parser.add_argument(
        "--no-run",
        action="store_true",
        help="train nothing; write the tables and the page of the runs that are finished",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the runs and how long they would take, and stop",
    )


def run(options: Namespace) -> int:
    """Carry out the runs of a grid, and write its tables."""
    grid = load_grid(options.table, options.scale)
    chosen = choose_runs(grid, options.only)
    check_choice("engine", options.engine, ENGINES)
    check_whole(options, "jobs", 1)
    if options.gpus_per_run is not None:
        check_non_negative("gpus_per_run", options.gpus_per_run)
    default = Path("reproduce") / f"{grid.table}-{grid.scale}"
    out = check_folder(default if options.out is None else options.out)
    if options.dry_run and options.no_run:
        raise UsageError(
            "--dry-run and --no-run cannot be combined: list the runs, or write the tables."
        )
    work_begins()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if options.engine == "ray":
        check_ray()
    if options.no_run:
        with locked(out):
            write_report(grid, out, {}, console)
        return 0
    if options.dry_run:
        show_plan(grid, chosen, out, options.jobs, console)
        return 0
    run_grid(
        grid,
        out,
        chosen=chosen,
        jobs=options.jobs,
        console=console,
        engine=options.engine,
        gpus_per_run=options.gpus_per_run,
    )
    return 0


def choose_runs(grid: Grid, pattern: str | None) -> tuple[PlannedRun, ...]:
    """Return the runs of a grid whose names match a pattern; None: all of them.

    Raises:
        UsageError: no name does.
    """
    if pattern is None:
        return grid.runs
    chosen = tuple(run for run in grid.runs if fnmatchcase(run.name, pattern))
    if not chosen:
        raise UsageError(
            f"`only` {pattern!r} matches no run of {grid.table}, {grid.scale}: names are like "
            f"{grid.runs[0].name}, and * stands for any characters; --dry-run lists the names."
        )
    return chosen


def find_states(runs: Iterable[PlannedRun], out: Path) -> dict[str, str]:
    """Return the state of each run.

    Raises:
        UsageError: a folder holds a run with other settings.
    """
    try:
        return {run.name: find_state(run, out) for run in runs}
    except RunError as error:
        raise UsageError(str(error)) from error


def check_ray() -> None:
    """Refuse to start if Ray is not installed."""
    from selectconv.lab.reproduce.ray_engine import import_ray

    try:
        import_ray()
    except RunError as error:
        raise UsageError(str(error)) from error


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
    chosen = grid.runs if chosen is None else chosen

    def launch(left: list[PlannedRun], tell: Callable[[Outcome], None]) -> None:
        from selectconv.lab.cli.live import LiveRuns  # imports torch

        with LiveRuns(left, out, jobs, console) as live:
            if engine == "ray":
                from selectconv.lab.reproduce.ray_engine import run_ray

                run_ray(left, out, jobs, tell, live.watch, gpus_per_run=gpus_per_run)
            else:
                run_local(left, out, jobs, tell, live.watch)

    with locked(out):
        _carry_out(grid, chosen, find_states(chosen, out), out, console, launch)


def _carry_out(
    grid: Grid,
    chosen: Sequence[PlannedRun],
    states: Mapping[str, str],
    out: Path,
    console: Console,
    launch: Callable[[list[PlannedRun], Callable[[Outcome], None]], None],
) -> None:
    console.print(f"{grid.title}. {grid.note}")
    console.print(
        f"{counted(len(chosen), 'run')}, {list(states.values()).count('done')} done; {out}"
    )
    problems = {run.name: run.problem for run in chosen if run.problem is not None}
    for name, problem in problems.items():
        console.print(f"{name} cannot run: {problem}")
    left = [run for run in chosen if states[run.name] in ("new", "resume")]
    ended = 0

    def tell(outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        word = "done" if outcome.problem is None else f"failed: {outcome.problem}"
        console.print(f"[{ended}/{len(left)}] {outcome.name} {word}")
        if outcome.problem is not None:
            problems[outcome.name] = outcome.problem

    try:
        launch(left, tell)
    except KeyboardInterrupt:
        console.print("interrupted: writing the tables of the finished runs")
        write_report(grid, out, problems, console)
        raise KeyboardInterrupt(
            "interrupted; the same command continues where it stopped."
        ) from None
    known = write_report(grid, out, problems, console)
    problems = {name: why for name, why in known.items() if name in states}
    if problems:
        named = ", ".join(problems)
        raise RunError(
            f"{len(problems)} of {len(chosen)} runs failed: {named}; their output is in "
            f"{out / LOGS}. To try again, run the same command. To repeat a run that is done but "
            "damaged, delete its folder first."
        )


def write_report(
    grid: Grid, out: Path, problems: Mapping[str, str | None], console: Console
) -> dict[str, str]:
    """Write the grid's tables and its page from what is finished.

    Returns:
        Why runs are missing that failed, cannot run, or are done but damaged, by name.
    """
    from selectconv.lab.report.build import build_report, write_results
    from selectconv.lab.report.runs.collect import collect
    from selectconv.lab.report.runs.examine import examine

    found = examine(collect([out / RUNS]))
    done = {run.name for run in found.runs}
    damaged = {
        run.name: found.reasons[run.name]
        for run in grid.runs
        if run.name in found.reasons and RunFolder(out / RUNS / run.name).status() == "done"
    }
    known = {**damaged, **{name: why for name, why in problems.items() if why is not None}}
    for name, why in damaged.items():
        console.print(f"{name} is done but cannot be reported: {why}")
    page, tables = build_report(
        found,
        title=grid.title,
        note=grid.note,
        table=grid.table,
        scale=grid.scale,
        test=grid.test,
        missing=grid.missing(done, known),
        first=grid.first,
        margin=grid.margin,
    )
    for path in write_results(out, page, tables):
        console.print(f"wrote {path}")
    return known


def show_plan(
    grid: Grid, chosen: Sequence[PlannedRun], out: Path, jobs: int, console: Console
) -> None:
    """Print the chosen runs of a grid with the time that they will take."""
    from selectconv.lab.reproduce.duration import estimate_seconds
    from selectconv.lab.reproduce.local_engine import threads_of
    from selectconv.lab.train.estimate import describe_duration

    states = find_states(chosen, out)
    seconds = estimate_seconds(chosen, threads_of(jobs))
    table = Table(
        Column("run", no_wrap=True, overflow="ignore"),
        "state",
        Column("takes about", no_wrap=True),
        box=None,
    )
    for run in chosen:
        takes = describe_duration(seconds[run.name]) if run.name in seconds else run.problem
        table.add_row(run.name, states[run.name], takes)
    console.print(f"{grid.title}. {grid.note}")
    console.print(table)
    left = sum(seconds[name] for name in seconds if states[name] != "done") / jobs
    console.print(
        f"{counted(len(chosen), 'run')} into {out}, {jobs} at a time on this machine: "
        f"about {describe_duration(left)}"
    )
