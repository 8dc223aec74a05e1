"""The families of attention kernels, by name."""

from pallas_paged.kernels.family import Family
from pallas_paged.kernels.mosaic_sm80.family import MOSAIC_SM80
from pallas_paged.kernels.mosaic_sm90.family import MOSAIC_SM90
from pallas_paged.kernels.triton.family import TRITON

FAMILIES: dict[str, Family] = {family.name: family for family in (TRITON, MOSAIC_SM90, MOSAIC_SM80)}
