"""Bring recorded runs to today's names; kept until the last runs of older code are in.

    python results/migrate.py FOLDER...   # each with runs somewhere below

A run of the small MobileNet names the function by its place in the package, which has moved to
`lab`. `growth: importance` was the default of a setting that is gone; `gradient` stays recorded.
"""

import sys
from pathlib import Path

OLD, NEW = "selectconv.reproduce.networks", "selectconv.lab.reproduce.networks"


def migrate(run: Path) -> None:
    """Rewrite one run's settings, and rename its folder."""
    config = run / "config.yaml"
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if line != "growth: importance\n").replace(OLD, NEW)
    config.write_text(text, encoding="utf-8")
    if OLD in run.name:
        run.rename(run.with_name(run.name.replace(OLD, NEW)))


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        for path in sorted(Path(folder).rglob("config.yaml")):
            migrate(path.parent)
