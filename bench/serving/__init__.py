"""How the engine serves, beside static batches and transformers."""
