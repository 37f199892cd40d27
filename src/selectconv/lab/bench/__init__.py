"""Measurements: ratios of ours to the plain way, side by side in one run."""
