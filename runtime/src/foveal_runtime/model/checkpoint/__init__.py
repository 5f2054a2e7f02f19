"""Checkpoints: loading, weight sizes, and the shape of a model."""
