"""What happened to every slot, replayed from `allocation.jsonl` and nothing else."""

from dataclasses import dataclass
from functools import cache

from selectconv.core.models import selective_layers
from selectconv.core.plan import LayerPlan
from selectconv.lab.report.runs.collect import Run
from selectconv.lab.train.network import build_model
from selectconv.lab.train.run_data import run_data
from selectconv.lab.train.run_folder import ALLOCATION, METRICS

OWN, CLOSED, MOVED = 0, 1, 2


@dataclass(frozen=True)
class LayerHistory:
    """The slots of one layer over the training.

    Attributes:
        name: the layer's dotted name.
        source: the channel that each slot reads at the end.
        states: at the end of each epoch, of each slot: `OWN`, `CLOSED` or `MOVED`.
        num_closed: how often each slot was closed.
        num_copied: how often each channel was chosen as the source of a re-opened slot.
    """

    name: str
    source: list[int]
    states: list[list[int]]
    num_closed: list[int]
    num_copied: list[int]


@cache
def replay(run: Run) -> list[LayerHistory]:
    """Replay a run's allocation, layer by layer in the order of the network.

    Raises:
        ValueError: the log does not fit the network, or does not lead to what the metrics count.
    """
    if not run.config.method_info.is_selective:
        return []  # learned groups and slimmed channels are not slots
    sizes = slot_counts(run)
    histories = {
        name: LayerHistory(name, list(range(size)), [], [0] * size, [0] * size)
        for name, size in sizes.items()
    }
    current = {name: [OWN] * size for name, size in sizes.items()}
    for epoch in range(run.config.epochs):
        for report in run.allocation:
            if report.epoch == epoch:
                for name, plan in report.plan:
                    if name not in sizes:
                        raise ValueError(f"the network has no layer {name!r}.")
                    _carry_out(plan, histories[name], current[name])
        for name, history in histories.items():
            history.states.append(list(current[name]))
    _check_end(run, list(histories.values()))
    return list(histories.values())


def _carry_out(plan: LayerPlan, history: LayerHistory, state: list[int]) -> None:
    closed, opened, sources = (part.tolist() for part in (plan.closed, plan.opened, plan.source))
    highest = max([*closed, *opened, *sources], default=0)
    if highest >= len(state):
        raise ValueError(f"{history.name!r} has {len(state)} slots; the log names {highest}.")
    for slot in closed:
        state[slot] = CLOSED
        history.num_closed[slot] += 1
    for slot, source in zip(opened, sources, strict=True):
        state[slot] = MOVED
        history.source[slot] = source
        history.num_copied[source] += 1


def _check_end(run: Run, layers: list[LayerHistory]) -> None:
    for name, state in (("closed", CLOSED), ("moved", MOVED)):
        replayed = sum(layer.states[-1].count(state) for layer in layers)
        counted = run.metrics[-1][name]
        if replayed != counted:
            raise ValueError(
                f"{replayed} slots are {name} by {ALLOCATION}, {counted} by {METRICS}."
            )


def slot_counts(run: Run) -> dict[str, int]:
    """Return the slots of each selective layer."""
    model = build_model(run.config, run_data(run.path, run.config))
    return {name: len(layer.gate) for name, layer in selective_layers(model).items()}
