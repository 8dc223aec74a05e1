"""The commands `python -m models.generate` and `python -m models.server`."""
