"""Tensor parallelism over the devices of one machine."""
