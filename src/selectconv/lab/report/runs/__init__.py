"""Finished runs, read from their folders and checked."""
