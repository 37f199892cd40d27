"""What a model computes: its graph, and what each operation does to channels."""
