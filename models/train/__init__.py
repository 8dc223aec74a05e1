"""Training of the byte-level demo model."""
