"""Check a built wheel: `python tests/support/check_wheel.py DIST_DIR`; `make check` runs it."""

import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPENDENCIES = ("torch", "numpy", "safetensors")
DATA_FILES = (
    "py.typed",
    "core/kernels/select.c",
    "train/recipes.yaml",
    "report/paper.yaml",
    "report/page.css",
    "report/page.js",
    "report/templates/lines.html",
    "report/templates/page.html",
    "report/templates/runs.html",
    "report/templates/slots.html",
    "report/templates/table.html",
    "reproduce/grids/table1.yaml",
    "reproduce/grids/table2.yaml",
    "reproduce/grids/table3.yaml",
    "reproduce/grids/ablation.yaml",
)


def problems(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel of the project, a line each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = f"{project['name']}-{project['version']}.dist-info"
    source = ROOT / "src"
    wanted = {path.relative_to(source).as_posix() for path in source.glob("selectconv/**/*.py")}
    wanted |= {f"selectconv/{name}" for name in DATA_FILES} | {f"{info}/licenses/LICENSE"}
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for name in sorted((wanted | metadata) - names):
            yield f"lacks {name}"
        for name in sorted(names - wanted - metadata):
            yield f"holds a stray {name}"
        if not metadata <= names:
            return
        fields = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    for field, value in (
        ("Name", project["name"]),
        ("Version", project["version"]),
        ("Requires-Python", project["requires-python"]),
    ):
        if fields[field] != value:
            yield f"has {field} {fields[field]!r}, wanted {value!r}"
    required = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    for package in DEPENDENCIES:
        if not any(line.startswith(f"{package}>=") for line in required):
            yield f"does not require {package}"
    if len(required) > len(DEPENDENCIES):
        yield f"requires {', '.join(required)}; wanted only {', '.join(DEPENDENCIES)}"
    if "selectconv = selectconv.__main__:main" not in entry_points.splitlines():
        yield "lacks the entry point `selectconv`"


def main(arguments: list[str]) -> int:
    """Check the one wheel in a folder; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python tests/support/check_wheel.py DIST_DIR", file=sys.stderr)
        return 2
    wheels = sorted(Path(arguments[0]).glob("*.whl"))
    if len(wheels) != 1:
        found = ", ".join(wheel.name for wheel in wheels) or "none"
        print(f"{arguments[0]}: wanted exactly one wheel, found {found}", file=sys.stderr)
        return 1
    found_problems = list(problems(wheels[0]))
    for problem in found_problems:
        print(f"{wheels[0].name} {problem}", file=sys.stderr)
    if not found_problems:
        print(f"OK {wheels[0].name}")
    return 1 if found_problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
