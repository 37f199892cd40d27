"""The `selectconv` command: one file a verb. Needs `selectconv[train]`."""
