"""A decoder for many checkpoints that generates text through `pallas_paged`."""
