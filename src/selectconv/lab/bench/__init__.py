"""Measurements: ratios of ours to the plain way, side by side in one run.

`selectconv bench` and the scripts in `benchmarks/` measure with these, and nowhere else.
"""
