"""Tables for people."""

from collections.abc import Collection, Sequence


def counted(number: int, noun: str) -> str:
    """Write a number of things.

    Example:
        >>> counted(1, "slot"), counted(1200, "slot")
        ('1 slot', '1,200 slots')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def text_table(lines: Sequence[Sequence[str]], right: Collection[int]) -> str:
    """Lay out rows of cells, the header first, in columns.

    Args:
        lines: equally many cells in each.
        right: columns of figures, which are aligned on the right.

    Example:
        >>> print(text_table([("layer", "open"), ("conv1", "7")], right={1}))
        layer  open
        conv1     7
    """
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
