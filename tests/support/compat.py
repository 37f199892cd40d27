"""Try the package with other versions: `make compat`, one environment at a time, then removed.

    python tests/support/compat.py [NAME...]   # or NAME=PYTHON: in an environment that is there

Each environment gets its torch first, then the wheel with the extra `test` and Triton; pip must
leave that torch alone. It runs the unit and integration tests, which carry out the commands of
README and docs, and load the compressed files that the other versions of torch wrote. Then it
writes such a file itself. docs/versions.md has the outcome; 20 GB of disk are needed for a while.
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"
FILES = Path(__file__).parent / "files"
# Python, and the versions that pip is held to. All Pythons must be on the PATH.
ENVIRONMENTS = {
    "oldest": ("3.11", "constraints-oldest.txt"),
    "pinned": ("3.11", "constraints.txt"),
    "newest, Python 3.12": ("3.12", None),
    "newest": ("3.13", None),
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILTERS = PROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"]
# Warnings of other packages are listed, and do not fail the tests; ours do.
TESTS = ("-m", "pytest", "-q", "-n", "2", "--timeout", "600", "-p", "no:cacheprovider",
         "-Wdefault", "-Werror::selectconv.SelectConvWarning", *(f"-W{one}" for one in FILTERS[1:]),
         "tests/unit", "tests/integration", "tests/test_docs.py")  # fmt: skip
SEEN = (
    "import platform, numpy, torch, triton; print(platform.python_version(), torch.__version__, "
    "numpy.__version__, triton.__version__)"
)
MARK = "<!-- from here: tests/support/compat.py -->"
HEADER = """\
| environment | Python | torch | numpy | triton | passed | skipped | failed | warnings | on |
|---|---|---|---|---|---:|---:|---:|---:|---|"""


def build_example():
    """Build a network of modules whose arguments have changed with torch, and an input for it."""
    import torch
    from torch import nn

    layers = [
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False),
        nn.BatchNorm2d(8, affine=False), nn.PReLU(8), nn.GroupNorm(2, 8),
        nn.Upsample(scale_factor=2), nn.ConvTranspose2d(8, 4, 2), nn.LayerNorm(17, bias=False),
        nn.AvgPool2d(2), nn.Hardtanh(), nn.GroupNorm(2, 4, affine=False), nn.MaxPool2d(2),
        nn.Flatten(), nn.RMSNorm(64), nn.Linear(64, 2), nn.GELU("tanh"),
    ]  # fmt: skip
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.linspace(0, value.numel(), value.numel()).sin().view_as(value))
    return model, torch.linspace(-1, 1, 384).view(2, 3, 8, 8)


def write_file() -> None:
    """Write the example as this version of torch writes it."""
    import selectconv as sc

    model, x = build_example()
    release = ".".join(sys.modules["torch"].__version__.split(".")[:2])
    sc.save_compressed(sc.compress(model, x), FILES / f"compressed_torch_{release}.safetensors")


def make_environment(name: str, home: Path) -> str:
    """Make an environment in a folder, and return its Python."""
    version, constraints = ENVIRONMENTS[name]
    subprocess.run([f"python{version}", "-m", "venv", str(home)], check=True)
    python = str(home / ("Scripts" if os.name == "nt" else "bin") / "python")
    held = [] if constraints is None else ["--constraint", str(ROOT / constraints)]
    install = (python, "-m", "pip", "install", "--quiet", *held)
    run(*install, "torch", "hatchling")
    before = run(python, "-c", "import torch; print(torch.__version__)")
    wheels = str(home / "dist")
    run(python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, str(ROOT))
    (wheel,) = (home / "dist").glob("*.whl")
    run(*install, f"{wheel}[test]")
    run(python, "-m", "pip", "install", "triton")  # comes with torch's CUDA builds
    after = run(python, "-c", "import torch; print(torch.__version__)")
    assert after == before, f"pip has replaced torch {before} by {after}"
    return python


def run(*command: str, fails: bool = False) -> str:
    """Run a command in the root of the repository, and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode and not fails:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def try_environment(name: str, python: str) -> list[str]:
    """Run the tests with a Python; returns what the page says of the environment."""
    said = run(python, *TESTS, fails=True)
    (ROOT / "dist").mkdir(exist_ok=True)
    (ROOT / "dist" / f"compat-{name}.txt").write_text(said, encoding="utf-8")
    last = re.findall(r"(\d+) (passed|skipped|failed|error)", said.splitlines()[-1])
    passed, skipped, failed, errors = (
        sum(int(count) for count, what in last if what == which)
        for which in ("passed", "skipped", "failed", "error")
    )
    pattern = r"(?m)^  \S+:\d+: (\w+Warning: .{0,40})"
    warnings = sorted(set(re.findall(pattern, re.sub(r" \(pid=\d+\)", "", said))))
    run(python, __file__, "--write")
    # A run that ended before its first test has failed.
    cells = (name, *run(python, "-c", SEEN).split(), passed, skipped,
             failed + errors if passed else "all", len(warnings),
             datetime.date.today().isoformat())  # fmt: skip
    return [f"| {' | '.join(map(str, cells))} |", *(f"- {name}: {one}" for one in warnings)]


def update(page: str, name: str, lines: list[str]) -> str:
    """Return the page with other lines about an environment: a row of the table, and warnings."""
    text, _, generated = page.partition(f"{MARK}\n")
    others = [
        line
        for line in generated.splitlines()[2:]
        if line and not line.startswith((f"| {name} |", f"- {name}: "))
    ]
    rows, warnings = (sorted(line for line in others + lines if line[0] == first) for first in "|-")
    return "\n".join([text + MARK, HEADER, *rows, "", *warnings, ""])


def main(*names: str) -> None:
    """Try these environments, or all; `NAME=PYTHON`: one that is there. Names those that failed."""
    if names == ("--write",):
        return write_file()
    failed = []
    for name, _, python in (word.partition("=") for word in names or ENVIRONMENTS):
        with tempfile.TemporaryDirectory(prefix="compat-") as home:
            lines = try_environment(name, python or make_environment(name, Path(home)))
        PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), name, lines), encoding="utf-8")
        print(*lines, sep="\n", flush=True)
        failed += [name] if lines[0].split(" | ")[7] != "0" else []
    sys.exit(", ".join(failed) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
