"""Run docs/start.md from top to bottom and write its outputs; `make tutorial`."""

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "start.md"
# A block and its output, which need not be there yet.
_BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


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
    text = PAGE.read_text(encoding="utf-8")
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            printed = iter(run_page(text))
        finally:
            os.chdir(here)

    def fill(block: re.Match[str]) -> str:
        said = next(printed)
        parts = [f"```python\n{block[1]}```"]
        if said:
            parts.append(f"```text\n{said}```")
        return "\n\n".join(parts)

    PAGE.write_text(_BLOCK.sub(fill, text), encoding="utf-8")


if __name__ == "__main__":
    main()
