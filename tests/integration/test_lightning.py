"""The Lightning callback; `lightning_runs.py` trains in one process of its own, for all of this."""

import json
import subprocess
import sys

import pytest

from shimmed_run import SUPPORT, TIMEOUT_S, run_shimmed


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    done = run_shimmed([SUPPORT / "lightning_runs.py", folder], folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = pytest.mark.timeout(TIMEOUT_S)


def test_trains_to_the_bits_of_a_plain_loop(said):
    assert said["moved by hand"] > 0
    assert said["same as by hand"]
    assert said["epochs of reports"] == [0, 1, 2]  # the first half of six epochs


def test_logs_what_moved_and_closed(said):
    assert said["logged"] == {
        "selectconv/moved": said["moved by hand"],
        "selectconv/closed": 0,
    }
    assert said["logged without log"] == []


def test_resumes_to_the_same_bits(said):
    assert said["resumed from train"]
    assert said["steps after train"] == [2]


def test_makes_up_for_the_step_that_a_validation_checkpoint_lacks(said):
    assert said["resumed from validation"]
    assert said["steps after validation"] == [1, 2]


def test_followers_follow_and_the_right_optimizer_is_found(said):
    assert said["follower follows"]
    assert said["optimizer of the layers"]


def test_a_budget_is_kept(said):
    assert said["part left by the budget"] < 0.75


def test_refuses_in_words(said):
    wanted = (
        "`gamma`",
        "'select'?",
        "'gama'",
        "`target_macs`",
        "no selective layers",
        "no `max_epochs`",
    )
    assert all(part in text for part, text in zip(wanted, said["refusals"], strict=True))


def test_its_example_runs(said):
    failed, attempted = said["doctests"]
    assert (failed, attempted > 0) == (0, True)


def test_a_missing_package_is_named(tmp_path):
    # A finder that refuses packages by name; no shim, so torchvision is one of them.
    script = """
import sys
class Blocker:
    blocked = {"torchvision", "lightning"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(name + " is blocked", name=name)
sys.meta_path.insert(0, Blocker())
import selectconv.integrations
for Blocker.blocked in ({"torchvision", "lightning"}, {"torchvision", "torchmetrics"}):
    try:
        import selectconv.integrations.lightning
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    missing, broken = done.stdout.splitlines()
    assert missing.endswith("needs lightning: pip install 'selectconv[lightning]'.")
    assert broken.endswith("torchmetrics is blocked.")  # lightning's own affair
