"""How long a decode step of a model takes, and its sampling."""
