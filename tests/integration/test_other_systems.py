"""What macOS and Windows lack is taken away here: fork, fcntl, a compiler, an output in UTF-8."""

import os
import re
import subprocess
import sys

LACKING = """
import multiprocessing, os, sys
sys.modules["fcntl"] = None
del os.fork
if multiprocessing.get_start_method(allow_none=True) is None:
    multiprocessing.set_start_method("spawn")
"""
SCRIPT = """
import torch
from selectconv.__main__ import main
from selectconv.core.kernels import describe_path
small = ["--subset=32", "--test-subset=32", "--batch-size=16", "--epochs=2", "--gamma=0.3",
         "--model-options={growth_rate: 4, units: [1, 1]}"]
for words in (["train", "--data=digits", *small, "--out=first"], ["eval", "first"],
              ["compress", "first"], ["report", "first"]):
    assert main(words) == 0, words
print(describe_path(torch.device("cpu")))
"""


def test_a_run_from_training_to_its_report(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),  # no kernel that was built before
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "PYTHONIOENCODING": "ascii",
        "PYTHONWARNDEFAULTENCODING": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no C compiler" in done.stdout.splitlines()[-1]
    assert "selectconv" not in "".join(re.findall("(?m)^.*EncodingWarning.*$", done.stderr))
    assert (tmp_path / "first" / "compressed.safetensors").exists()
