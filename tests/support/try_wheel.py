"""Install a wheel in an empty environment and try it: `python tests/support/try_wheel.py DIST_DIR`.

Run by `make release`. The environment has the wheel and what it needs, nothing else: `import` must
work, the command must say what to install, and the README's example must run.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def main(arguments: list[str]) -> int:
    """Try the one wheel in a folder; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python tests/support/try_wheel.py DIST_DIR", file=sys.stderr)
        return 2
    (wheel,) = Path(arguments[0]).resolve().glob("*.whl")
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        venv.create(home / "env", with_pip=True)
        python = str(home / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python")

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([python, *words], cwd=home, capture_output=True, text=True)

        install = ("-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS))
        check("install torch", run(*install, "torch"))  # first and alone, as in the Makefile
        check("install the wheel", run(*install, str(wheel)))
        said = check("import", run("-c", "import selectconv; print(selectconv.__version__)"))
        assert said.strip() == version, f"it says {said.strip()}, the file's name {version}"
        assert version in check("--version", run("-m", "selectconv", "--version"))
        bare = run("-m", "selectconv", "train")
        assert bare.returncode == 1, bare
        assert "pip install 'selectconv[train]'" in bare.stderr, bare.stderr
        block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
        (home / "example.py").write_text(block)
        check("the README's example", run("example.py"))
    print(f"OK {wheel.name}: installed and tried in an empty environment")
    return 0


def check(what: str, done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed; stop where it failed."""
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
