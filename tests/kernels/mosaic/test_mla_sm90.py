"""Multi-head latent attention by the kernel for Hopper, without a GPU interpreted."""

import re
from functools import partial

import numpy as np
import pytest

from pallas_paged.kernels.call import Call
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90.support import why_not_latents
from tests.support import latent_calls
from tests.support.attention_calls import assert_same_bits
from tests.support.attention_cases import mosaic_case
from tests.support.devices import HOPPER, implementations_here
from tests.support.latent_calls import assert_near, every_option
from tests.support.marks import slow

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

INTERPRET = "mosaic_sm90" not in implementations_here()
V = 512
attend_latents = partial(
    latent_calls.attend_latents, v=V, implementation="mosaic_sm90", interpret=INTERPRET
)
expected_of = partial(latent_calls.expected_of, v=V)
latents = partial(mosaic_case, num_kv_heads=1, head_dim=V + 64, pages_per_seq=9)
SPLIT = dict(fixed_split_size=64)
TREE = np.random.default_rng(0).random((2, 6, 6)) < 0.5
TREE[0, 3] = False

# More than 16 query rows of a sequence: fewer are left to the kernel for Ampere.
decode = partial(latents, seq_lens=(70, 0), num_q_heads=24)
ragged = partial(latents, seq_lens=(70, 20), q_lens=(6, 5), num_tokens=13, num_q_heads=3)
CASES = [
    (decode(), every_option(24, **SPLIT)),
    (ragged(dtype="float16"), dict(tree_mask=TREE, sliding_window=6, **SPLIT)),
    *slow(
        [
            (decode(num_q_heads=128), {}),  # a cluster of two programs
            (ragged(num_q_heads=72), dict(tree_mask=TREE)),  # whose last has few rows
            (decode(page_size=8, pages_per_seq=16), {}),
            (decode(page_size=128), dict(kv_layout="NHD")),
            (ragged(), every_option(3)),
            (ragged(num_q_heads=40), {}),  # tiles begin within the heads of a token
            (ragged(), dict(causal=False)),
        ]
    ),
]


@pytest.mark.cpu_budget(25)  # interpreted
@pytest.mark.parametrize(("case", "options"), CASES)
def test_equals_the_oracle(case, options):
    arrays = case.make()
    actual = attend_latents(arrays, **options)
    given = {k: x for k, x in options.items() if k not in ("fixed_split_size", "kv_layout")}
    assert_near(actual, expected_of(arrays, **given), case.tolerance)


REAL = dict(page_size=64, pages_per_seq=80)
LENGTHS = (0, 1, 31, 33, 5000, *range(200, 3000, 97))
PROMPTS = dict(seq_lens=(700, 0, 65, 3000, 1), q_lens=(700, 0, 1, 130, 1), num_tokens=1000)


@pytest.mark.skipif(INTERPRET, reason="takes too long where the kernel is interpreted")
@pytest.mark.parametrize("with_options", [False, True], ids=["plain", "options"])
@pytest.mark.parametrize("num_q_heads", [20, 128])
@pytest.mark.parametrize("rows", [dict(seq_lens=LENGTHS), dict(seq_lens=(5000,)), PROMPTS])
def test_real_sizes_on_a_gpu(rows, num_q_heads, with_options):
    case = latents(num_q_heads=num_q_heads, **rows, **REAL)
    arrays, options = case.make(), every_option(num_q_heads) if with_options else {}
    first = attend_latents(arrays, **options)
    assert_near(first, expected_of(arrays, **options), case.tolerance)
    for _ in range(100):
        assert_same_bits(attend_latents(arrays, **options), first)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(num_q_heads=16), "tiles of 64 rows"),
        (dict(num_q_heads=16, kernel="ragged", num_tokens=32), None),
        (dict(page_size=4), "page_size of at least 8, not 4"),
        (dict(head_dim=256), r"latents of \(512, 64\) elements, not \(256, 64\)"),
    ],
    ids=str,
)
def test_which_calls_are_left_to_the_kernel_for_ampere(change, reason):
    sizes = dict(kernel="decode", num_tokens=4, num_q_heads=32, head_dim=V, page_size=16)
    dtype = np.dtype("float16")
    call = Call(
        device=HOPPER, dtype=dtype, kv_dtype=dtype, num_seqs=4, num_kv_heads=1, max_kv_len=64,
        rope_dim=64, **sizes | change,
    )  # fmt: skip
    found = why_not_latents(call)
    assert found is None if reason is None else re.search(reason, found)
