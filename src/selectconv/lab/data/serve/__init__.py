"""Serve augmented batches of images to a training loop."""
