"""The log of a training, and replaying it onto a fresh copy."""

import copy
import json

import pytest
import torch

import selectconv as sc
from selectconv.allocate.report import read_log
from tiny_models import (
    allocation_of,
    assert_same,
    conv_net,
    dense_net,
    silence,
    snapshot,
    train,
)


def allocator_for(model, optimizer=None, **arguments):
    return sc.ChannelAllocator(model, optimizer, **{"total_epochs": 20, **arguments})


def trained_log(path, build=conv_net, **arguments):
    """Train with steps that really act; write the log as users do; return the model's states."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    fresh = copy.deepcopy(model)
    allocator = allocator_for(model, optimizer, gamma=0.2, **arguments)
    with path.open("w") as file:
        for epoch in range(4):
            train(model, optimizer, seed=epoch)
            report = allocator.step(epoch)
            if report:
                file.write(json.dumps(report.to_dict()) + "\n")
    return fresh, model, allocator


# Replay


@pytest.mark.parametrize("mode", ["select", "zero", "random", "dealloc"])
@pytest.mark.parametrize("build", [conv_net, dense_net])
def test_a_log_replayed_on_a_fresh_copy_gives_the_same_allocation(tmp_path, build, mode):
    path = tmp_path / "allocation.jsonl"
    fresh, model, allocator = trained_log(path, build, mode=mode, grace=1)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(events) >= 2, "a test of the order of events needs several"
    replaying = allocator_for(fresh, mode=mode, grace=1, seed=5)
    reports = replaying.replay(path)
    assert [report.to_dict() for report in reports] == events
    assert_same(allocation_of(fresh), allocation_of(model))
    assert_same(replaying.state_dict()["opened_at"], allocator.state_dict()["opened_at"])
    assert replaying.last_epoch == events[-1]["epoch"]
    with pytest.raises(sc.AllocationError, match="stepped already"):
        replaying.step(replaying.last_epoch)
    replaying.step(replaying.last_epoch + 1)


def test_rows_and_strings_are_logs_too_and_followers_follow(tmp_path):
    path = tmp_path / "log.jsonl"
    fresh, model, _ = trained_log(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for log in (str(path), rows, iter(rows)):
        twin, follower = copy.deepcopy(fresh), copy.deepcopy(fresh)
        allocator_for(twin, followers=[follower]).replay(log)
        assert_same(allocation_of(twin), allocation_of(model))
        assert_same(allocation_of(follower), allocation_of(model))


def test_events_on_demand_are_logged_and_replayed():
    model = conv_net()
    fresh = copy.deepcopy(model)
    silence(model)
    allocator = allocator_for(model)
    log = [allocator.dealloc().to_dict(), allocator.realloc().to_dict()]
    assert [row["epoch"] for row in log] == [None, None]
    replaying = allocator_for(fresh)
    replaying.replay(log)
    assert_same(allocation_of(fresh), allocation_of(model))
    assert replaying.last_epoch == -1


def row(epoch=1, **layers):
    return {"epoch": epoch, "layers": layers}


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            [row(conv2={"closed": [1], "opened": [[1, 0, None]]}), row(nine={})],
            "`row 2`: .*needs `closed`",
        ),
        (
            [row(conv1={"closed": [3], "opened": []}), row(nine={"closed": [1], "opened": []})],
            "does not have: .*'nine'",
        ),
        # The slot was closed and re-opened by the first row: the second cannot open it again.
        (
            [
                row(conv2={"closed": [1], "opened": [[1, 0, None]]}),
                row(2, conv2={"closed": [], "opened": [[1, 2, None]]}),
            ],
            r"`conv2`: slots \[1\] are open already",
        ),
        (
            [
                row(conv1={"closed": [3], "opened": []}),
                row(conv2={"closed": [1], "opened": [[1, 0, None]], "weight_seed": 1 << 63}),
            ],
            r"`conv2`: `weight_seed` must be in .* got 9223372036854775808",
        ),
        ([row("soon")], "`row 1`: .*needs `epoch`, an integer or null, .*'soon'"),
        ([{"layers": {}}], "`row 1`: .*needs `epoch`"),
        ([3], "`row 1`: .*needs `epoch`.*got 3"),
        ([row(conv1=5)], "`row 1`: A layer's plan needs"),
        (
            [row(), row(conv1={"closed": [-2], "opened": []})],
            "`row 2`: .*count from 0",
        ),
        (
            [row(conv1={"closed": [3], "opened": [[3, -1, None]]})],
            "`row 1`: .*count from 0",
        ),
        ({"epoch": 0, "layers": {}}, "`log` must be .* got dict"),
        (7, "`log` must be .* got int"),
        ("nowhere.jsonl", "nowhere.jsonl cannot be read: No such file"),
    ],
)
def test_a_log_that_does_not_fit_changes_nothing(log, message):
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    train(model, optimizer)
    allocator = allocator_for(model, optimizer)
    before = snapshot(model, optimizer, allocator)
    with pytest.raises(sc.AllocationError, match=message):
        allocator.replay(log)
    assert_same(snapshot(model, optimizer, allocator), before)


def test_half_a_line_does_not_count_and_nonsense_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    good = json.dumps(row(conv1={"closed": [3, 5], "opened": [[3, 0, [0.5, -1.0]]]}))
    path.write_text(f"{good}\n{good[:20]}")
    assert [json.dumps(report.to_dict()) for report in read_log(path)] == [good]
    for bad, message in (("nonsense", "line 2, is not JSON"), ("[]", "line 2`: a row of the log")):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(sc.AllocationError, match=message):
            read_log(path)
