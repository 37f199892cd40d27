"""Random small CNNs with random allocations compute the same when they are compressed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_convert_properties import networks

import selectconv as sc
from scrambled import assert_compresses_the_same, scramble


@settings(max_examples=25)
@given(
    model=networks(),
    seed=st.integers(0, 2**31),
    closed=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    moved=st.sampled_from([0.0, 0.3]),
    round_to=st.sampled_from([None, None, 4]),
)
def test_same_outputs(model, seed, closed, moved, round_to):
    x = torch.randn(2, 3, 12, 9)
    scramble(sc.convert(model, x), seed=seed, closed=closed, moved=moved)
    assert_compresses_the_same(model, x, **({} if round_to is None else {"round_to": round_to}))
