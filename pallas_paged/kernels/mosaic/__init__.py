"""What the Mosaic kernels of all GPUs share."""
