"""Run docs/start.md from top to bottom and write its outputs and pictures; `make tutorial`."""

import contextlib
import io
import os
import re
import shutil
import tempfile
from pathlib import Path

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "start.md"
# What the page's blocks save, and what is seen there.
PICTURES = {
    "gammas.svg": "What a step would leave at each gamma",
}
# A block, its output and its picture; the last two need not be there yet.
_BLOCK = re.compile(
    r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?(?:\n\n!\[[^\]]*\]\(figures/start-[^)]*\))?",
    re.DOTALL,
)


def run_page(text: str) -> list[str]:
    """Run the page's blocks, one after the other in the current folder; return what each prints."""
    space: dict[str, object] = {"__name__": "start"}
    printed = []
    for number, block in enumerate(_BLOCK.finditer(text)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block[1], f"start.md, block {number}", "exec"), space)
        printed.append(out.getvalue())
    return printed


def outputs(text: str) -> list[str | None]:
    """Return the outputs that stand on the page; None where a block has none."""
    return [block[2] for block in _BLOCK.finditer(text)]


def main() -> None:
    """Write the page."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "selectconv"
    text = PAGE.read_text(encoding="utf-8")
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            printed = iter(run_page(text))
            for name in PICTURES:
                shutil.copy(name, DOCS / "figures" / f"start-{name}")
        finally:
            os.chdir(here)

    def fill(block: re.Match[str]) -> str:
        said = next(printed)
        parts = [f"```python\n{block[1]}```"]
        if said:
            parts.append(f"```text\n{said}```")
        parts += [
            f"![{words}](figures/start-{name})"
            for name, words in PICTURES.items()
            if name in block[1]
        ]
        return "\n\n".join(parts)

    PAGE.write_text(_BLOCK.sub(fill, text), encoding="utf-8")


if __name__ == "__main__":
    main()
