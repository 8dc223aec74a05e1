"""The programs that a list of calls lowers to for an H200, as digests without names.

A digest is of a kernel's module, canonicalised and without debug locations, symbol names and the
order of constants. `python -m tests.support.programs` writes the digests of this JAX into
`tests/kernels/goldens`: run it after a deliberate change of kernels, and commit the result.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from pallas_paged.pages.layout import LAYOUTS, KVLayout
from tests.support import raw
from tests.support.devices import lower_for_cuda

GOLDENS = Path(__file__).parents[1] / "kernels" / "goldens" / f"programs-jax-{jax.__version__}.json"
FUNCTIONS = {"decode": raw.paged_attention, "ragged": raw.ragged_paged_attention}
FUNCTIONS["cascade"] = raw.cascade_attention
PER_HEAD = np.ones(32, np.float32)
OPTIONS: dict[str, Any] = dict(
    sliding_window=100, soft_cap=30.0, alibi_slopes=PER_HEAD, sinks=PER_HEAD, return_lse=True
)
TREE = {"tree_mask": np.ones((4, 40, 40), bool)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A call, by its static sizes."""

    function: str
    implementation: str
    num_seqs: int = 4
    num_tokens: int = 0  # of ragged queries
    max_kv_len: int = 4096
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int | None = None  # of V alone
    num_pages: int = 1009  # no other size is 1009, so it marks the pool in the lowered text
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    one_scale: bool = False
    kv_layout: KVLayout = "HPND"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        sizes = f"{self.num_seqs}x{self.max_kv_len}"
        if self.num_tokens:
            sizes += f" {self.num_tokens} tokens"
        heads = f"{self.num_q_heads}/{self.num_kv_heads}/{self.head_dim}/{self.page_size}"
        if self.v_head_dim is not None:
            heads += f" and {self.v_head_dim}"
        words = [self.implementation, self.function, sizes, heads, self.dtype, self.kv_dtype]
        return " ".join(w for w in (*words, *self.options) if w)

    def call_and_shapes(self) -> tuple[Callable[..., Any], dict[str, jax.ShapeDtypeStruct]]:
        """The call as a function of its arrays, and their shapes."""

        def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

        layout, head_dim = LAYOUTS[self.kv_layout], self.head_dim
        shape = layout.shape(H=self.num_kv_heads, P=self.num_pages, N=self.page_size, D=head_dim)
        pages = of(*shape, dtype=self.kv_dtype or self.dtype)
        num_tokens = self.num_tokens or self.num_seqs
        arrays = dict(
            q=of(num_tokens, self.num_q_heads, self.head_dim, dtype=self.dtype),
            k_pages=pages,
            block_tables=of(self.num_seqs, self.max_kv_len // self.page_size),
            seq_lens=of(self.num_seqs),
        )
        if not layout.one_array:
            shape_of_v = (*shape[:-1], self.v_head_dim or head_dim)
            arrays |= dict(v_pages=of(*shape_of_v, dtype=pages.dtype))
        if self.function == "ragged":
            arrays |= dict(cu_q_lens=of(self.num_seqs + 1))
        if self.function == "cascade":
            arrays |= dict(prefix_lens=of(2), cu_group_sizes=of(3))
        if self.kv_dtype:
            of_tokens = layout.scale_shape(layout.full_shape(shape))
            scales = of(*() if self.one_scale else of_tokens, dtype="float32")
            arrays |= dict(k_scales=scales, v_scales=scales)
        how = dict(implementation=self.implementation, kv_layout=self.kv_layout, **self.options)
        function = FUNCTIONS[self.function]

        def call(arrays: dict[str, jax.Array]) -> Any:
            return function(**{"v_pages": None} | arrays, **how)

        return call, arrays

    def lower(self) -> jax.stages.Lowered:
        """The call lowered for CUDA."""
        return lower_for_cuda(*self.call_and_shapes())

    def text(self) -> str:
        return self.lower().as_text()

    def digests(self) -> list[str]:
        """A digest for each kernel, in order."""
        texts = map(_kernel_text, kernel_configs(self.lower()))
        return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def operations(module: ir.Operation, name: str) -> list[ir.Operation]:
    """The operations of a module whose name ends so, in order."""
    found = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name.endswith(name):
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.walk(visit)
    return found


def kernel_configs(lowered: jax.stages.Lowered) -> list[ir.DictAttr]:
    """What a program gives to each of its Pallas kernels."""
    calls = operations(lowered.compiler_ir().operation, "stablehlo.custom_call")
    name = "mhlo.backend_config"
    return [ir.DictAttr(op.attributes[name]) for op in calls if name in op.attributes]


@contextmanager
def parsed(module: ir.Attribute) -> Iterator[ir.Operation]:
    """The module of a kernel."""
    with mlir.make_ir_context() as context:
        register_dialects(context)
        yield ir.Module.parse(ir.StringAttr(module).value_bytes).operation


def register_dialects(context: ir.Context) -> None:
    from jax._src.lib import mosaic_gpu_dialect, triton

    triton.dialect.register_dialect(context)
    mosaic_gpu_dialect.register_dialect(context)
    context.allow_unregistered_dialects = True


def programs() -> list[Program]:
    """Decoding, ragged queries, options, head sizes, page sizes and dtypes in all families."""
    found = []
    for family in ("triton", "mosaic_sm90"):

        def add(function: str, family: str = family, **sizes: Any) -> None:
            name = "mosaic_sm80" if (function, family) == ("decode", "mosaic_sm90") else family
            found.append(Program(function=function, implementation=name, **sizes))

        for num_seqs, max_kv_len in ((1, 1024), (1, 131072), (8, 2048), (64, 4096), (256, 1024)):
            add("decode", num_seqs=num_seqs, max_kv_len=max_kv_len)
        for num_seqs, num_tokens in ((1, 8192), (16, 16384), (64, 64), (64, 192)):
            add("ragged", num_seqs=num_seqs, num_tokens=num_tokens)
        add("ragged", num_seqs=1, num_tokens=1024, max_kv_len=1024)
        for sizes in (
            dict(head_dim=64),
            dict(head_dim=256),
            dict(num_kv_heads=1, dtype="float16"),
            dict(num_kv_heads=32),
            dict(page_size=64),
        ):
            add("decode", num_seqs=64, **sizes)
            add("ragged", num_tokens=4096, **sizes)
        for name, value in OPTIONS.items():
            add("decode", num_seqs=64, options={name: value})
        for name, value in (OPTIONS | TREE).items():
            add("ragged", num_tokens=512, options={name: value})
        add("decode", num_seqs=64, options=OPTIONS)
        add("ragged", num_tokens=512, options=OPTIONS | TREE)
        add("cascade", num_seqs=64, options=OPTIONS)
    sm80: dict[str, Any] = dict(implementation="mosaic_sm80")
    found += [
        Program(function="decode", num_seqs=64, kv_dtype="int8", **sm80),
        *(Program(function="decode", num_seqs=64, head_dim=n, **sm80) for n in (80, 512)),
        Program(function="ragged", num_tokens=512, options=OPTIONS | TREE, **sm80),
        Program(function="ragged", num_tokens=4096, kv_dtype="float8_e4m3fn", **sm80),
        *(Program(function="ragged", num_tokens=4096, head_dim=n, **sm80) for n in (80, 128, 512)),
        Program(function="cascade", num_seqs=64, options=OPTIONS, **sm80),
    ]
    for kv_dtype, dtype in itertools.product(("int8", "float8_e4m3fn"), ("bfloat16", "float32")):
        types = dict(implementation="triton", kv_dtype=kv_dtype, dtype=dtype)
        found += [
            Program(function="decode", num_seqs=1, max_kv_len=1024, **types),
            Program(function="decode", num_seqs=64, options=OPTIONS, **types),
            Program(function="ragged", num_tokens=4096, **types),
            Program(function="ragged", num_seqs=64, num_tokens=128, **types),
        ]
    return found


def _kernel_text(backend_config: ir.DictAttr) -> str:
    """A kernel's launch and its module, canonicalised and without names."""
    launch = []
    text = ""
    for attribute in backend_config:
        if attribute.name in ("ir", "module"):  # of Triton, of Mosaic
            with parsed(attribute.attr) as module:
                PassManager.parse("builtin.module(canonicalize,cse)").run(module)
                text = module.get_asm(enable_debug_info=False)
        elif attribute.name not in ("kernel_hash", "name", "debug"):
            launch.append(f"{attribute.name}={attribute.attr}")
    # JAX 0.11 counts the kernels of the process in this name.
    text = re.sub(r'mosaic_gpu\.dump_basename = "[^"]*", ', "", text)
    names: dict[str, str] = {}
    text = re.sub(r'@"[^"]*"|@[\w$.]+', lambda m: names.setdefault(m[0], f"@{len(names)}"), text)
    lines = text.splitlines()
    constants = sorted(line.strip() for line in lines if "arith.constant" in line)
    code = [line for line in lines if "arith.constant" not in line]
    return "\n".join([*sorted(launch), *constants, *code])


if __name__ == "__main__":
    digests = {}
    for program in programs():
        try:
            digests[program.name] = program.digests()
        except NotImplementedError as e:
            print(f"{program.name}: {e}")
    GOLDENS.parent.mkdir(exist_ok=True)
    GOLDENS.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(digests)} programs in {GOLDENS}")
