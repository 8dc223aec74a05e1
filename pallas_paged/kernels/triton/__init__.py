"""Kernels by the Triton lowering of Pallas."""
