"""Which sequences run in the next call, and on which pages; no JAX."""
