"""The paper: shifts, expected channel damage, Algorithms 1 and 2, the selective layer."""
