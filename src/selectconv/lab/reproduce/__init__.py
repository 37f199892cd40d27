"""The paper's tables as grids of runs: what to run, and running it without repeating anything."""
