"""Tables for people: as text in a terminal, as HTML in a notebook."""

from collections.abc import Collection, Sequence
from html import escape

Lines = Sequence[Sequence[str]]


def counted(number: int, noun: str) -> str:
    """Write a number of things.

    Example:
        >>> counted(1, "slot"), counted(1200, "slot")
        ('1 slot', '1,200 slots')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def text_table(lines: Lines, right: Collection[int]) -> str:
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


def html_table(lines: Lines, right: Collection[int], note: str = "") -> str:
    """Write the same as HTML, with a note below.

    Example:
        >>> html_table([("a",), ("<b>",)], right=())
        '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """

    def row(cells: Sequence[str], tag: str) -> str:
        styles = [' style="text-align: right"' if n in right else "" for n in range(len(cells))]
        inner = "".join(
            f"<{tag}{style}>{escape(cell)}</{tag}>"
            for cell, style in zip(cells, styles, strict=True)
        )
        return f"<tr>{inner}</tr>"

    body = "".join(row(cells, "td") for cells in lines[1:])
    table = f"<table><thead>{row(lines[0], 'th')}</thead><tbody>{body}</tbody></table>"
    return table + (f"<p>{escape(note)}</p>" if note else "")
