"""Budgets: how much of the dense model's cost a training may end with."""

from selectconv.checks import check_fraction


def check_targets(target_macs: float | None, target_params: float | None) -> list[str]:
    """Check the two targets, of which at most one is given; return the name of that one.

    Raises:
        TypeError, ValueError: both, or one that is not a number strictly between 0 and 1.
    """
    targets = {"target_macs": target_macs, "target_params": target_params}
    given = {name: value for name, value in targets.items() if value is not None}
    for name, value in given.items():
        if check_fraction(name, value) in (0.0, 1.0):
            raise ValueError(
                f"`{name}` must be a part of the dense model, above 0 and below 1; got {value!r}."
            )
    if len(given) > 1:
        raise ValueError(
            f"`target_macs` {target_macs!r} and `target_params` {target_params!r} exclude each "
            "other: give one of them."
        )
    return list(given)
