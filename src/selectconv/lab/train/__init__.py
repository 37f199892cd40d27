"""The paper's training from end to end, on lightning-fabric. Needs `selectconv[train]`."""
