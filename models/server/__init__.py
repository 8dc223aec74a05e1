"""`python -m models.server`: a checkpoint over HTTP, by `pallas_paged.server`."""
