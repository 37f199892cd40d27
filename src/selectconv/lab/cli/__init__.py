"""The `selectconv` command: one file per verb. Needs `selectconv[train]`."""
