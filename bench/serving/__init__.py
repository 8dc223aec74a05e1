"""The bench of the serving engine, beside static batches and transformers."""
