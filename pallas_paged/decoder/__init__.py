"""Layers of a decoder around attention."""
