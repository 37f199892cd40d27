"""Beside any training loop: the allocator, its plans, budgets and optimizers."""
