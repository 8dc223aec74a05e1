"""Attention over pages: entries, their options, dispatch to kernels, gradients, meshes."""
