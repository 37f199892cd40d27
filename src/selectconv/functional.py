"""The paper's formulas as pure functions, each named for its concept."""

from selectconv.core.allocation import choose_dealloc, realloc_scores
from selectconv.core.ecdm import ecdm, normalize_ecdm, rms_damage
from selectconv.core.moments import expected_activation, expected_relu
from selectconv.core.shift import select_channels, shift2d

__all__ = [
    "choose_dealloc",
    "ecdm",
    "expected_activation",
    "expected_relu",
    "normalize_ecdm",
    "realloc_scores",
    "rms_damage",
    "select_channels",
    "shift2d",
]
