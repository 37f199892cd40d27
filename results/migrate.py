"""Bring recorded runs to today's names and files; kept until the last runs of older code are in.

    python results/migrate.py FOLDER...   # each with runs somewhere below

A run of the small MobileNet names the function by its place in the package, which has moved to
`lab`. `growth: importance` was the default of a setting that is gone; `gradient` stays recorded.
Older runs have no manifest: it is written from their files as they are, which `digests.json`, where
there is one, must agree with.
"""

import hashlib
import json
import sys
from pathlib import Path

from selectconv.lab.train.run_folder import MANIFEST, OWN, STATUS, RunFolder

OLD, NEW = "selectconv.reproduce.networks", "selectconv.lab.reproduce.networks"


def migrate(run: Path) -> None:
    """Rewrite one run's settings, write its manifest, and rename its folder."""
    digests = run / "digests.json"
    recorded = json.loads(digests.read_text(encoding="utf-8")) if digests.exists() else {}
    contents = {
        name: (run / name).read_bytes()
        for name in sorted(OWN)
        if name not in (STATUS, MANIFEST) and (run / name).is_file()
    }
    for name, content in contents.items():
        if name in recorded and hashlib.sha256(content).hexdigest() not in recorded[name]:
            raise SystemExit(f"{run / name} is damaged: nothing was changed in {run}.")
    lines = contents["config.yaml"].decode().splitlines(keepends=True)
    text = "".join(line for line in lines if line != "growth: importance\n").replace(OLD, NEW)
    if not (run / MANIFEST).exists() or text.encode() != contents["config.yaml"]:
        RunFolder(run).write({**contents, "config.yaml": text.encode()})
    digests.unlink(missing_ok=True)
    if OLD in run.name:
        run.rename(run.with_name(run.name.replace(OLD, NEW)))


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        for path in sorted(Path(folder).rglob("config.yaml")):
            migrate(path.parent)
