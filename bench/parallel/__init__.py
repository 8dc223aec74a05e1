"""How attention, decode steps and serving scale over GPUs."""
