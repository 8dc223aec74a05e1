"""An HTTP server with OpenAI's endpoints over the engine: `python -m models.server`."""
