"""C kernels, packed weights, fused modules and threads on CPUs."""
