"""Every kernel compiles to machine code, within bounds of registers and spills, without a GPU."""

import re

import jax
import pytest

from tests.support import sass
from tests.support.marks import slow
from tests.support.programs import Program

ROOT = sass.cuda_root()
if ROOT is None:
    pytest.skip("needs CUDA's compilers: pip install '.[sass]'", allow_module_level=True)
if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need JAX 0.11", allow_module_level=True)

# The registers of a thread and the bytes that it may spill, by a pattern of the target, the call
# and the kernel; the first that is found counts. They are a little above what ptxas 13.5 needs, see
# bench/notes/compilers.md. A kernel that is not here may spill nothing.
BOUNDS = {
    # 128 rows and 4 warps are 128 f32 of accumulators a thread, and faster than fewer.
    r"triton ragged with options.* ragged_paged_attention$": (255, 6500),
    r"triton ragged .* ragged_paged_attention$": (255, 1400),
    r"triton gradient attention_gradient_of_keys$": (255, 320),
    r"mosaic_sm90 ragged with options ragged_paged_attention$": (168, 1000),
    r"mosaic_sm90 ragged 192 and 128 with options ragged_paged_attention$": (232, 1000),
    r"mosaic_sm90 ragged .*32/8/256.* ragged_paged_attention$": (168, 300),
    r"mosaic_sm90 (ragged|wide ragged|cascade) .* ragged_paged_attention$": (232, 100),
    r"mosaic_sm90 gradient attention_gradient_of_keys$": (168, 60),
    r"mosaic_sm.* (paged_decode|ragged_paged_attention)$": (255, 800),
    r"mosaic_sm90 (ragged latents|latents with).* mla_attention$": (168, 400),
    r" latents with options mla_attention$": (255, 32),
    r" paged_decode_merge$": (100, 0),
    r" (ragged|few_rows)_plan$": (64, 0),
    r" sampling_": (128, 0),
    r" rotate_and_write_\w+$": (80, 0),
    r"": (255, 0),
}


@pytest.fixture(scope="module")
def compile_for():
    with sass.compiler(ROOT) as compile_for:
        yield compile_for


# Slow tests: kernels that other calls have too, and further sizes of a call. By default each kernel
# is compiled for Hopper plain or with all options, with pages of 16 bits and of one byte; and one
# kernel is for each other GPU.
SLOW = re.compile(
    "|".join(
        (
            r"8.0 (?!triton decode int8$)",
            r"8.6 (?!triton ragged 4x4096 .* float32$)",
            r"8.9 (?!triton rotary write int8$)",
            r"10.0 (?!triton decode bfloat16$)",
            r"12.0 (?!triton decode int8$)",
            r"9.0 \w+ (cascade|ragged bfloat16|ragged int8|wide ragged float8)",
            r"9.0 \w+ (decode|latents|ragged latents|rotary write|latent write) float8",
            r"9.0 (triton|mosaic_sm80) (decode bfloat16|latents with)",
            r"9.0 (triton ragged float8|\w+ ragged latents$|mosaic_sm80 ragged latents int8)",
            r"9.0 (triton|mosaic_sm80) ragged 192 and 128 with options",
            r"9.0 mosaic_\w+ ragged 192 and 128$",
            r"9.0 triton (rotary|latent) write bfloat16",
            r"9.0 mosaic_sm90 between attentions$",
            r"9.0 .* (1x8192|64x4096 192 tokens|64x4096 32/8/512/16) ",
            r"9.0 (mosaic_sm80 ragged .*/192/16 and 128|.* 64x4096 32/8/64/16) ",
            r"9.0 mosaic_sm80 decode 64x4096 32/8/256/16 ",
            r"9.0 .* 4096 tokens \S*/(64|256|512)/16 ",
            r"9.0 .* 4096 tokens .* float8_e4m3fn$",
            r"9.0 mosaic_\w+ ragged .* 4096 tokens .* int8$",
        )
    )
)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, marks=[pytest.mark.slow] if SLOW.match(str(one)) else [])
        for one in sass.compilations()
    ],
    ids=str,
)
def test_compiles_within_bounds(one, compile_for):
    try:
        usages = sass.kernels_of(compile_for(one.target, one.function, *one.shapes))
    except NotImplementedError as e:
        pytest.skip(str(e))
    assert usages
    for usage in usages:
        name = f"{one} {usage.kernel}"
        registers, spills = next(b for pattern, b in BOUNDS.items() if re.search(pattern, name))
        assert usage.registers <= registers and usage.spills <= spills, name
        assert usage.shared_memory <= one.target.shared_memory, name


HEADS = (dict(), dict(num_q_heads=16), dict(head_dim=64))
ROWS = [(64, 4096), (64, 2432), (128, 2048), (256, 1024)]
SIZES = [dict(num_seqs=n, max_kv_len=length, **heads) for n, length in ROWS for heads in HEADS]
SIZES.insert(1, dict(num_seqs=64, kv_layout="NHD"))
SIZES.append(dict(num_seqs=64, kv_layout="HND"))


@pytest.mark.parametrize("sizes", [*SIZES[:4], *slow(SIZES[4:])], ids=str)
def test_four_programs_of_triton_decode_fit_on_an_sm(sizes, compile_for):
    """With one more register than 128 only three do, and 64x4096 takes 297 us instead of 248."""
    program = Program(function="decode", implementation="triton", **sizes)
    usages = compile_for(sass.TARGETS["9.0"], *program.call_and_shapes())
    (decode,) = (usage for usage in usages if usage.kernel == "paged_decode")
    assert decode.registers <= 128 and decode.spills == 0


def test_what_ptxas_prints_is_read():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for paged_decode_mosaic_gpu_kernel
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
    (usage,) = sass.usages_of(log, sass.TARGETS["9.0"], {"paged_decode": "2048"})
    wanted = sass.Usage(kernel="paged_decode", registers=168, spills=12, shared_memory=2048)
    assert usage == wanted and sass.kernels_of([usage]) == [wanted]
