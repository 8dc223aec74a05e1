"""Kernels for Hopper GPUs by the Mosaic GPU lowering of Pallas."""
