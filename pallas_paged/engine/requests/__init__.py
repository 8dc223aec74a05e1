"""What users of the engine ask for: requests, their tokens and their text; no JAX."""
