"""Kernels for Ampere GPUs and later ones by the Mosaic GPU lowering of Pallas."""
