"""How long prompts, chunks of prompts and a few tokens per sequence take."""
