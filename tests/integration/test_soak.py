"""The campaigns of soak/ still run: a few trials of each; and the driver survives its trials."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soak.architectures import FAMILIES, TooSlow, describe_steps, in_order, names
from soak.driver import BROKEN, CRASHED, HUNG, LOST, WRONG, results_of, run_campaign
from soak.networks import Walk
from soak.summary import PAGE, describe_results

ROOT = Path(__file__).parents[2]
# In one process, which imports torch once; networks come last, since nothing may be computed
# before a fork. Ranks are left to tests/distributed.
TRIALS = {
    "damage": (0, 1, 2),
    "kills": (0,),
    "pairs": (0,),
    "calls": (0, 1, 2, 3),
    "networks": (0,),
}
SCRIPT = """
import json, sys
from soak import kills
from soak.driver import run_trial
kills.KILLS = 1
for name, numbers in json.loads(sys.argv[1]).items():
    for number in numbers:
        print(json.dumps([name, run_trial(name, 0, number)]), flush=True)
"""


def test_a_few_trials_of_the_campaigns():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(TRIALS)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _ in rows] == [name for name in TRIALS for _ in TRIALS[name]]
    assert [row for _, row in rows if row["how"] in WRONG] == []


def test_the_driver_survives_its_trials_and_goes_on_where_it_stopped(tmp_path, capsys):
    first = run_campaign("troubled", 0, range(2), folder=tmp_path)
    rows = run_campaign("troubled", 0, range(5), folder=tmp_path)
    assert [rows[number]["how"] for number in range(5)] == ["fine", LOST, CRASHED, HUNG, BROKEN]
    assert rows[0] == first[0]  # not again
    assert not Path(rows[1]["detail"]).exists()
    assert "KeyError" in rows[4]["detail"]
    assert results_of("troubled", 0, tmp_path) == rows
    assert results_of("troubled", 1, tmp_path) == {}
    again = run_campaign("troubled", 0, range(2), folder=tmp_path, again=True)
    assert again[0] == first[0]
    assert again[1]["how"] == LOST
    assert len((tmp_path / "troubled.jsonl").read_text().splitlines()) == 6


def test_a_trial_depends_on_seed_and_number_alone(tmp_path):
    rows = [
        run_campaign("troubled", seed, [0], folder=tmp_path / str(place))[0]
        for place, seed in enumerate((0, 0, 1))
    ]
    assert rows[0]["number"] == rows[1]["number"] != rows[2]["number"]


def test_the_page_says_what_the_results_say():
    assert describe_results(0) in PAGE.read_text(encoding="utf-8"), "python -m soak summary"
    page = (ROOT / "soak" / "ARCHITECTURES.md").read_text(encoding="utf-8")
    assert describe_steps() in page, "python -m soak architectures"


def test_the_networks_of_timm_are_in_order():
    sizes = {"b/y50": 3, "b/y18": 2, "b/x9": 4, "a/z2": 1, "b/y101": 5}
    assert in_order(sizes) == ["a/z2", "b/y18", "b/x9", "b/y50", "b/y101"]
    listed = names()
    assert len(listed) == len(set(listed)) > 600
    assert {name.partition("/")[0] for name in listed} == set(FAMILIES)


def test_no_step_takes_the_end_of_its_time_for_an_error():
    def slow():
        raise TooSlow

    with pytest.raises(TooSlow):
        Walk(None, None, "").take("converted", slow)


@pytest.mark.parametrize("how", WRONG)
def test_the_summary_lists_what_went_wrong(tmp_path, how):
    row = {"seed": 0, "trial": 7, "what": "a|b", "how": how, "date": "2026-01-01", "detail": "x\ny"}
    (tmp_path / "damage.jsonl").write_text(json.dumps(row) + "\n")
    text = describe_results(0, tmp_path)
    assert f"| 1 of 200 | - | 1 {how} |" in text
    assert f"- `damage` 7, a|b: {how}: x y" in text
