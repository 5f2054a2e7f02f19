"""Multimodal items: identification, processing, placement, injection."""
