"""The product of a weight with one row: its blocks, how programs send and multiply them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_paged.decoder.kernels.operands import BlockWeights
from pallas_paged.kernels.mosaic import ops
from pallas_paged.kernels.mosaic.indexed import gather
from pallas_paged.kernels.mosaic_sm90.config import LINEAR_TILE as TILE
from pallas_paged.kernels.mosaic_sm90.config import DecoderBlockConfig, padded
from pallas_paged.kernels.mosaic_sm90.ring import wgmma_transforms

HALF = 128  # columns of a half of a stage: both halves of a block are 32 KB


@dataclasses.dataclass(frozen=True)
class Product:
    """A weight as work items, and their blocks, for each program.

    A work item is a tile of features and one part of the columns, or of the experts; a program has
    every `num_programs`-th item. Behind the end of a weight are zeros: a copy writes them to shared
    memory and reads nothing. Behind a tile of less than 64 features is what was there before.
    """

    weight: Any  # ref [N, K] or [N, 2, K], or of experts [X, N, K] or [X, N, 2, K]
    bias: Any = None  # ref [N] or [N, 2], or of experts, to device memory
    _: dataclasses.KW_ONLY
    num_programs: int
    num_in_flight: int  # blocks on their way at once
    num_features: int  # with padding; of each expert
    tile: int = TILE  # features of an item
    num_splits: int = 1
    experts: Any = None  # ref i32 to shared memory, the experts of all splits
    experts_per_split: int = 1

    @property
    def is_pair(self) -> bool:
        """Whether the halves of a stage are gate and up of the same columns."""
        return len(self.weight.shape) - (self.experts is not None) == 3

    @property
    def num_columns(self) -> int:
        """Columns of an item, of one expert, in entire blocks."""
        block = HALF if self.is_pair else 2 * HALF
        num_splits = self.num_splits if self.experts is None else 1
        return padded(self.weight.shape[-1], num_splits * block) // num_splits

    @property
    def num_blocks(self) -> int:
        """Stages of an item, of one expert."""
        return self.num_columns // (HALF if self.is_pair else 2 * HALF)

    def num_items(self, program: Any) -> Any:
        """Return how many items a program has."""
        total = padded(self.num_features, self.tile) // self.tile * self.num_splits
        return lax.div(total - 1 - program + self.num_programs, self.num_programs)

    def item(self, program: Any, index: Any) -> tuple[Any, Any]:
        """Return the features of an item, as a slice, and its part of the columns."""
        item = program + index * self.num_programs
        first = lax.div(item, self.num_splits) * self.tile
        return pl.ds(first, self.tile), lax.rem(item, self.num_splits)

    def count(self, features: Any) -> Any:
        """Return how many features of an item there are: the last one may have fewer."""
        return jnp.minimum(self.tile, self.num_features - features.start)

    def parts(self, split: Any) -> list[Any]:
        """Return the parts of an item: numbers of its experts, or its split of the columns."""
        return [split * self.experts_per_split + i for i in range(self.experts_per_split)]

    def halves(self, features: Any, part: Any, block: Any) -> list[Any]:
        """Return the refs to the two halves of a block."""
        weight, first = self.weight, part * self.num_columns
        if self.experts is not None:
            weight, first = weight.at[self.experts[part]], 0
        if self.is_pair:
            return [weight.at[features, i, pl.ds(first + block * HALF, HALF)] for i in range(2)]
        first += block * 2 * HALF
        return [weight.at[features, pl.ds(first + i * HALF, HALF)] for i in range(2)]

    def padded_weight(self) -> jax.Array:
        """Return the weight, an array, with the zeros that a copy writes behind it."""
        sizes = list(self.weight.shape)
        sizes[self.experts is not None] = padded(self.num_features, self.tile)
        sizes[-1] = self.num_columns * (self.num_splits if self.experts is None else 1)
        more = [(0, size - old) for size, old in zip(sizes, self.weight.shape, strict=True)]
        return jnp.pad(self.weight, more)

    def add_bias(
        self, features: Any, part: Any, *, interpret: bool
    ) -> Callable[[list[Any]], list[Any]]:
        """Load the bias of a part; return a function that adds it to the sums of the part."""
        bias = self.bias
        if bias is None:
            return lambda sums: sums
        if self.experts is not None:
            bias = bias.at[self.experts[part]]
        count = bias.shape[0] - features.start
        if self.experts is None:
            count = jnp.where(part == 0, count, 0)  # once
        row = ops.iota((TILE,), 0, ops.WGMMA_ROW)
        place = jnp.minimum(features.start + row, bias.shape[0] - 1)
        places = [2 * place + i for i in range(2)] if self.is_pair else [place]
        loaded = [
            gather(bias, place, ops.WGMMA_ROW, interpret=interpret).astype(jnp.float32)
            for place in places
        ]
        factor = jnp.where(row < count, 1.0, 0.0)
        return lambda sums: [x + y * factor for x, y in zip(sums, loaded, strict=True)]


def products_of(
    weights: BlockWeights, config: DecoderBlockConfig, num_features: dict[str, int], experts: Any
) -> dict[str, Product]:
    """Return the products of a block, by the names of their weights, which are refs or arrays.

    `num_features` are from `one_row_refs.padded_features`, and `experts` those of gate, up and
    down.
    """
    splits = dict(o=config.o_splits, down=config.down_splits, router=config.router_splits)
    if experts is not None:
        splits["gate_up"] = config.experts_per_token
    tiles = {name: getattr(config, f"{name}_tile", TILE) for name in num_features}
    return {
        name: Product(
            getattr(weights, name),
            None if name == "router" else getattr(weights, f"{name}_bias"),  # it is for the choice
            num_programs=config.num_programs,
            num_in_flight=min(round(config.num_in_flight * TILE / tiles[name]), config.num_stages),
            num_features=count,
            tile=tiles[name],
            num_splits=splits.get(name, 1),
            experts=experts if name in ("gate_up", "down") else None,
            experts_per_split=config.experts_per_split if name == "down" else 1,
        )
        for name, count in num_features.items()
    }


def send_products(products: dict[str, Product], scratch: Any, program: Any) -> None:
    """Send a program's blocks of each weight, those of experts once they are chosen.

    `scratch` is the kernel's `OneRowScratch`.
    """
    num_stages = scratch.weights.shape[0]

    def wait_for_blocks(arrived: Any, end: Any) -> Any:
        """Wait until blocks before `end` have arrived; return how many have."""

        @pl.loop(arrived, end)
        def _(block):
            plgpu.barrier_wait(scratch.full.at[lax.rem(block, num_stages)])

        return jnp.maximum(arrived, end)

    def send_block(product: Product, features: Any, part: Any, block: Any, counts: Any) -> Any:
        sent, arrived = counts
        stage = ops.free_stage(scratch.free, sent)
        arrived = wait_for_blocks(arrived, sent + 1 - product.num_in_flight)
        for i, half in enumerate(product.halves(features, part, block)):
            to = scratch.weights.at[stage, pl.ds(i * TILE, product.tile)]
            plgpu.copy_gmem_to_smem(half, to, scratch.full.at[stage])
        return sent + 1, arrived

    counts: Any = jnp.int32(0), jnp.int32(0)  # blocks that were sent, and that have arrived
    for name, product in products.items():

        def send_item(index: Any, counts: Any, product: Product = product) -> Any:
            features, split = product.item(program, index)
            for part in product.parts(split):
                send = functools.partial(send_block, product, features, part)
                counts = lax.fori_loop(0, product.num_blocks, send, counts)
            return counts

        counts = lax.fori_loop(0, product.num_items(program), send_item, counts)
        if name == "router":
            plgpu.barrier_wait(scratch.choice.chosen)
    sent, arrived = counts
    ops.drain(scratch.free, sent)
    wait_for_blocks(arrived, sent)


def multiply_by_row(
    accs: Sequence[jax.Array], weights: Sequence[Any], rows: Sequence[Any], *, interpret: bool
) -> list[jax.Array]:
    """Return `acc + weight @ row` for each accumulator [64, 8], in its first column.

    wgmma wants 8 rows at least. It reads them in units of 8 elements, wherever its descriptor says
    that the next one is: here each row begins 8 elements after the one before. So a vector in
    shared memory is enough; the other columns are not of use and may hold anything.

    Args:
        weights: refs `[64, K]` to matrices of wgmma of 16-bit elements in shared memory.
        rows: refs `[K]` to vectors there, with 56 more elements behind each.
    """
    if interpret:
        return [
            acc.at[:, 0].add(weight[...].astype(jnp.float32) @ row[...].astype(jnp.float32))
            for acc, weight, row in zip(accs, weights, rows, strict=True)
        ]
    dtype = weights[0].dtype
    count, num_columns = len(accs), weights[0].shape[1]
    tile = 128 // dtype.itemsize
    result = plgpu.ShapeDtypeStruct(accs[0].shape, jnp.float32, layout=ops.WGMMA)
    matrix = plgpu.RefType(wgmma_transforms(dtype))

    @plgpu.inline_mgpu(
        arg_types=([ops.WGMMA] * count, [matrix] * count, [plgpu.RefType()] * count),
        return_type=[result] * count,
    )
    def multiply(_, accs, weights, rows):
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()

        def descriptor(ref, constant):
            address = llvm.ptrtoint(i64, utils.memref_ptr(ref))
            address = arith.shrui(arith.andi(address, utils.c(0x3FFFF, i64)), utils.c(4, i64))
            return arith.ori(address, utils.c(constant, i64))

        # Swizzled rows of 128 bytes, 8 rows of all tiles after the 8 before; and not swizzled.
        groups = num_columns // tile * 1024 >> 4
        of_weight = 1 << 62 | groups << 32 | 1 << 16
        of_row = 1 << 32 | 1 << 16
        args = []
        for acc in accs:
            for register in acc.registers.flat:
                args += [vector.extract(register, [], [i]) for i in range(2)]
        args += [descriptor(weight, of_weight) for weight in weights]
        args += [descriptor(row, of_row) for row in rows]
        n = 4 * count
        kind = {"bfloat16": "bf16", "float16": "f16"}[dtype.name]
        lines = ["{ .reg .b64 a, b;", "wgmma.fence.sync.aligned;"]
        for k in range(0, num_columns, 16):
            for i in range(count):
                numbers = ", ".join(f"${4 * i + j}" for j in range(4))
                step = k // tile * 64 + k % tile // 8
                lines += [
                    f"add.s64 a, ${2 * n + i}, {step};",
                    f"add.s64 b, ${2 * n + count + i}, {k // 8};",
                    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.{kind}.{kind}"
                    f" {{{numbers}}}, a, b, 1, 1, 1, 0, 0;",
                ]
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"]
        constraints = ["=f"] * n + [str(i) for i in range(n)] + ["l"] * (2 * count)
        out = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * n),
            args,
            "\n".join(lines),
            ",".join(constraints),
            has_side_effects=True,
        )
        values = [llvm.extractvalue(f32, out, [i]) for i in range(n)]
        kind = ir.VectorType.get((2,), f32)
        pairs = [vector.from_elements(kind, values[i : i + 2]) for i in range(0, n, 2)]
        return [
            ops.of_registers(pairs[2 * i : 2 * i + 2], acc.layout, acc.shape)
            for i, acc in enumerate(accs)
        ]

    return multiply(list(accs), list(weights), list(rows))
