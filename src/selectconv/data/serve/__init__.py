"""Batches of images, augmented, for a training loop."""
