"""Run Python in a process of its own where lightning and timm import, whatever torchvision is."""

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent
TIMEOUT_S = 300  # a busy machine takes ten times its CPU seconds


def run_shimmed(arguments, folder):
    """Run `python ARGUMENTS` in a folder; the shim reaches all processes that it starts, too."""
    (folder / "sitecustomize.py").write_text("import torchvision_shim as s; s.install()\n")
    path = os.pathsep.join(map(str, [folder, SUPPORT, SUPPORT.parents[1] / "src"]))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
