"""How fast libraries outside JAX are."""
