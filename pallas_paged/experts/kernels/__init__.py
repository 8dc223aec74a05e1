"""The kernels of expert products."""
