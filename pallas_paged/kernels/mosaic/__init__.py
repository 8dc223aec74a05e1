"""Parts that the Mosaic kernels of all GPUs share."""
