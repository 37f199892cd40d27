"""Check the wheel in a folder: `python tests/support/check_wheel.py DIST_DIR [--try]`.

`make check` compares what it holds and requires with the project. `make release` also installs it,
with what it needs and nothing else, in an empty environment: `import` must work, the command must
say what to install, and the README's example must run.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INFO = f"{PROJECT['name']}-{PROJECT['version']}.dist-info"
METADATA = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}


def problems(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel of the project, a line each."""
    source = ROOT / "src"
    files = [path for path in source.glob("selectconv/**/*") if path.suffix != ".pyc"]
    wanted = {path.relative_to(source).as_posix() for path in files if path.is_file()}
    wanted |= {f"{INFO}/licenses/LICENSE", *METADATA}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        yield from (f"lacks {name}" for name in sorted(wanted - names))
        yield from (f"holds a stray {name}" for name in sorted(names - wanted))
        fields = Parser().parsestr(archive.read(f"{INFO}/METADATA").decode())
        entry_points = archive.read(f"{INFO}/entry_points.txt").decode()
    for field in ("Name", "Version", "Requires-Python"):
        if fields[field] != (value := PROJECT[field.lower()]):
            yield f"has {field} {fields[field]!r}, wanted {value!r}"
    required = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    if {re.split(r"\W", line)[0] for line in required} != {"torch", "numpy", "safetensors"}:
        yield f"requires {', '.join(required)}"
    if "selectconv = selectconv.__main__:main" not in entry_points.splitlines():
        yield "lacks the entry point `selectconv`"


def try_in(home: Path, wheel: Path) -> None:
    """Install a wheel in an empty environment below a folder, and use it."""
    venv.create(home / "env", with_pip=True)
    python = str(home / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python")

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run([python, *words], cwd=home, capture_output=True, text=True)
        assert done.returncode == code, f"{words} failed:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    install = ("-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"))
    run(*install, "torch")  # first and alone, as in the Makefile
    run(*install, str(wheel))
    said = run("-c", "import selectconv; print(selectconv.__version__)")
    assert said.strip() == PROJECT["version"], said
    assert PROJECT["version"] in run("-m", "selectconv", "--version")
    said = run("-m", "selectconv", "train", code=1)
    assert "pip install 'selectconv[train]'" in said, said
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (home / "example.py").write_text(block)
    run("example.py")


def main(folder: str, *options: str) -> None:
    """Check the one wheel in a folder, and try it if asked to."""
    (wheel,) = Path(folder).resolve().glob("*.whl")
    if found := list(problems(wheel)):
        raise SystemExit("\n".join(f"{wheel.name} {problem}" for problem in found))
    if "--try" in options:
        with tempfile.TemporaryDirectory() as home:
            try_in(Path(home), wheel)
    print(f"OK {wheel.name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
