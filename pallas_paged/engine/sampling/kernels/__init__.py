"""The kernels of sampling."""
