"""Which runs can be reported: those whose files fit their network."""

from selectconv.errors import SelectConvError
from selectconv.lab.report.runs.collect import Collection
from selectconv.lab.report.runs.replay import replay
from selectconv.lab.report.runs.size import measure_size


def examine(found: Collection) -> Collection:
    """Leave out runs whose log or weights do not fit their network, with the reason."""
    sound = Collection([], list(found.left_out), list(found.notes), dict(found.reasons))
    for run in found.runs:
        try:
            replay(run)
            measure_size(run)
        except (SelectConvError, TypeError, ValueError, RuntimeError) as error:
            sound.leave_out(run.path, error)
        else:
            sound.runs.append(run)
    return sound
