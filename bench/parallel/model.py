"""What a decode step on several devices reads and sends, on paper.

`decode_step` counts bytes from a model's sizes, and `DecodeStep.limit_us` turns them into a time.
`bench.parallel.programs` counts the bytes of compiled programs beside them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from models.decoder import ModelConfig
from models.decoder.sharding import config_on


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of a machine; the defaults are those of hosts of 8 H200.

    Attributes:
        read: GB/s that a device reads from its memory; of an H200, what `bench.decode` measures.
        link: GB/s that a device sends to others of its host, by NVLink.
        network: GB/s that a device sends to other hosts, at 400 Gb/s for each device.
        collective_us: time of a collective without data.
    """

    read: float = 4389.0
    link: float = 450.0
    network: float = 50.0
    collective_us: float = 0.0


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size.

    Attributes:
        kind: "all-reduce", "all-gather" or "all-to-all".
        num_bytes: of the result on each device.
        num_devices: devices that exchange their parts with one another.
        num_hosts: hosts of these devices. Two that differ in this alone are equal.
    """

    kind: str
    num_bytes: int
    num_devices: int
    num_hosts: int = field(default=1, compare=False)

    def us(self, rates: Rates) -> float:
        """Return the time in microseconds: within each host, and between hosts."""
        local = self.num_devices // self.num_hosts
        if self.kind == "all-to-all":
            link = (local - 1) / self.num_devices * self.num_bytes
            network = (self.num_devices - local) / self.num_devices * self.num_bytes
        else:  # an all-reduce is a reduce-scatter and an all-gather
            passes = 2 if self.kind == "all-reduce" else 1
            link = passes * (local - 1) / local * self.num_bytes
            network = passes * (self.num_hosts - 1) / self.num_hosts * self.num_bytes / local
        return rates.collective_us + (link / rates.link + network / rates.network) / 1e3


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """What each device reads and sends in one step.

    Attributes:
        weight_bytes, kv_bytes: read from its memory.
        collectives: how often each occurs.
    """

    weight_bytes: int
    kv_bytes: int
    collectives: Counter[Collective]

    def read_us(self, rates: Rates) -> float:
        """Return the time to read weights and K/V, in microseconds."""
        return (self.weight_bytes + self.kv_bytes) / rates.read / 1e3

    def collectives_us(self, rates: Rates) -> float:
        """Return the time of all collectives, in microseconds."""
        return sum(n * c.us(rates) for c, n in self.collectives.items())

    def limit_us(self, rates: Rates) -> float:
        """Return the time of the step: a collective and the product after it do not overlap."""
        return self.read_us(rates) + self.collectives_us(rates)


def decode_step(
    config: ModelConfig,
    *,
    num_seqs: int,
    length: int,
    tensor: int = 1,
    context: int = 1,
    devices_per_host: int = 8,
    itemsize: int = 2,
    kv_itemsize: int | None = None,
) -> DecodeStep:
    """Return what a greedy decode step of a model reads and sends on `tensor * context` devices.

    Heads are sharded over `tensor` devices, which repeat KV heads if there are fewer, and the pages
    of each row over `context` devices. All devices of `context` compute q, k and v, and the other
    weights are sharded over all devices (`shard_heads` of `context_parallel.paged_attention`).

    Args:
        config: the model's sizes.
        num_seqs: rows.
        length: tokens of each row.
        devices_per_host: devices of a host; those of `tensor` are neighbours.
        itemsize: bytes of a weight and of an activation.
        kv_itemsize: bytes of an element of K or V, if another; 1 has a scale for each token.

    Raises:
        ValueError: the devices can't share the heads or the MLP evenly.
    """
    num_devices = tensor * context
    config = config_on(config, tensor)
    hidden, head_dim, layers = config.hidden_size, config.head_dim, config.num_layers
    q_heads, kv_heads = config.num_q_heads, config.num_kv_heads
    norms = 2 * hidden + 2 * head_dim * config.qk_norm
    biases = (q_heads + 2 * kv_heads) * head_dim // tensor * config.qkv_bias
    layer_weights = (
        (q_heads + 2 * kv_heads) * head_dim * hidden // tensor
        + (q_heads * head_dim + 3 * config.intermediate_size) * hidden // num_devices
        + norms
        + biases
        + hidden * config.o_bias
    )
    head = config.vocab_size * hidden // num_devices
    element = kv_itemsize or itemsize
    token = 2 * kv_heads // tensor * (head_dim * element + 4 * (element == 1))

    hosts = math.ceil(num_devices / devices_per_host)
    tensor_hosts = math.ceil(tensor / devices_per_host)
    activations = num_seqs * hidden * itemsize
    # After attention and after the MLP of each layer, and after the embedding.
    found = [(Collective("all-reduce", activations, num_devices, hosts), 2 * layers + 1)]
    if context > 1:  # results and log-sum-exps of attention, each head to the device that has it
        states = num_seqs * q_heads // tensor * (head_dim * itemsize + 4)
        found.append((Collective("all-to-all", states, context, hosts // tensor_hosts), layers))
    # The largest logit of each device, and its token.
    found.append((Collective("all-gather", num_devices * num_seqs * 4, num_devices, hosts), 2))
    return DecodeStep(
        weight_bytes=(layers * layer_weights + head + hidden) * itemsize,
        kv_bytes=num_seqs * length * layers * token // context,
        collectives=Counter(dict(found)) if num_devices > 1 else Counter(),
    )
