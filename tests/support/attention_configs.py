"""Configs of attention, for small cases."""

from functools import partial

import pallas_paged as pp

LOOP = dict(block_k=16, num_programs=6, num_warps=2, num_stages=2)  # 3 for each of 2 KV heads


def config_of(implementation: str, *, ragged: bool, split: bool = False) -> object:
    """A config of the smallest blocks and few programs; with `split` rows are split in any case."""
    if implementation.startswith("mosaic_sm90") and ragged:
        loop = dict(block_k=64, num_stages=2, fixed_split_size=64 if split else None)
        return pp.MosaicSm90RaggedConfig(**loop, num_consumers=2, num_programs=3)
    if implementation.startswith("mosaic"):
        loop = dict(block_k=32, num_programs=6, fixed_split_size=32 if split else None)
        decode_config = partial(pp.MosaicSm80DecodeConfig, num_stages=2)
        ragged_config, tile = pp.MosaicSm80RaggedConfig, dict(block_q=64, num_warpgroups=1)
    else:
        loop = dict(LOOP, fixed_split_size=32 if split else None)
        decode_config, ragged_config = pp.DecodeConfig, pp.RaggedConfig
        tile = dict(block_q=16)
    return ragged_config(**loop | tile) if ragged else decode_config(**loop)
