"""Triton kernels of decoder layers on GPUs."""
