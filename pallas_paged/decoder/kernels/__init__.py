"""The kernels of a decoder's layer."""
