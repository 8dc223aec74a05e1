"""Measurements of the library on a GPU; run from the checkout, never installed."""
