"""A small Llama-family decoder that generates text through `pallas_paged`."""
