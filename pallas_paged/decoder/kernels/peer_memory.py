"""The memory of a device where the other GPUs of a host write.

    u32[REDUCE_ROWS]               sums so far; a copy for each program
    packets[2, devices, capacity]  of sums with even and with odd numbers, by sender: `all_reduce`
    words[2, devices, capacity]    likewise: `device_sums`
    u32[REDUCE_ROWS]               the next buffer; a copy for each program
    f32[3, ROW_BYTES / 4]          buffers of partial sums of one row: `device_mail`

Importing this module does not import Mosaic.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_paged.checks import pytree
from pallas_paged.kernels.mosaic_sm90.config import REDUCE_ROWS

DATA_BYTES = 8  # of a packet
PACKET_BYTES = 16
HEADER_BYTES = 4 * REDUCE_ROWS
NUM_BUFFERS = 3
ROW_BYTES = 512 * 1024  # of a buffer
MAX_POLLS = 1 << 27  # more than a minute


@pytree
class PeerMemory:
    """What a kernel needs to add up over devices: arrays of one device, or refs to them.

    Attributes:
        addresses: `i32[2 * N + 2]` for N devices, as in `all_reduce`.
        memory: `i32[1, size]`, where the others write.
        capacity: bytes of the largest array that the memory was made for, a multiple of 16.
    """

    addresses: Any
    memory: Any
    capacity: int = dataclasses.field(metadata={"static": True})

    @property
    def num_devices(self) -> int:
        return int(self.addresses.shape[0]) // 2 - 1

    @property
    def words_start(self) -> int:
        """Where the words start, in bytes, as the others."""
        return HEADER_BYTES + 2 * self.num_devices * packets_bytes(self.capacity)

    @property
    def buffers_start(self) -> int:
        return self.words_start + 2 * self.num_devices * self.capacity


def packets_bytes(num_bytes: int) -> int:
    """Return the bytes of the packets of so much data."""
    return -(-num_bytes // DATA_BYTES) * PACKET_BYTES


def memory_bytes(num_devices: int, capacity: int) -> int:
    """Return the bytes of a device's memory for arrays of up to `capacity` bytes."""
    of_sums = 2 * num_devices * (packets_bytes(capacity) + capacity)
    return 2 * HEADER_BYTES + of_sums + NUM_BUFFERS * ROW_BYTES


def own_address(addresses: str, num_devices: int) -> str:
    """Return PTX that sets `rank` and `own`, the address of this device's memory.

    It may not be that of the operand, which XLA may have copied.

    Args:
        addresses: the operand with the address of `PeerMemory.addresses`.
    """
    return (
        f"ld.global.b32 rank, [{addresses}+{8 * num_devices}];"
        f" mad.wide.u32 own, rank, 8, {addresses}; ld.global.b64 own, [own];"
    )
