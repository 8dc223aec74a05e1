"""`grouped_matmul` beside float64 NumPy, by XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.experts import grouped_matmul
from pallas_paged.experts.plan import Groups, max_tiles, sort_pairs, tiles_of
from tests.support import experts_oracle as oracle
from tests.support.attention_oracle import relative_error
from tests.support.experts_oracle import draw
from tests.support.marks import needs_triton, slow
from tests.support.promotion import strict_promotion

TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}
M, K, N = 300, 24, 40
# Empty groups first, last and between, groups of more than two tiles, all rows and none.
SIZES = [(0, 3, 270, 0, 0, 20, 0), (300, 0, 0, 0, 0, 0, 0), (0,) * 7, (1, 1, 1, 1, 128, 1, 167)]


@jax.jit
def product(x, w, sizes):
    return grouped_matmul(x, w, sizes, implementation="xla")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_are_multiplied_by_the_matrix_of_their_group(dtype, sizes):
    x, w = draw(1, M, K, dtype=dtype), draw(2, 7, K, N, dtype=dtype)
    x[sum(sizes) :] = np.nan
    out = product(x, w, np.array(sizes, np.int32))
    assert out.dtype == dtype and not np.asarray(out)[sum(sizes) :].any()
    if any(sizes):
        assert relative_error(out, oracle.grouped_matmul(x, w, sizes)) < TOLERANCE[dtype]


def test_transposed_matrices_give_the_same_product():
    x, w, sizes = draw(1, M, K), draw(2, 7, K, N), np.array(SIZES[0], np.int32)
    run = jax.jit(lambda x, w: grouped_matmul(x, w, sizes, transpose_rhs=True))
    assert relative_error(run(x, w.swapaxes(1, 2)), oracle.grouped_matmul(x, w, sizes)) < 1e-5


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_gradients_are_those_of_separate_products(transpose_rhs):
    sizes = np.array(SIZES[0], np.int32)
    x, w, d_out = draw(1, M, K), draw(2, 7, K, N), draw(3, M, N)
    w = w.swapaxes(1, 2) if transpose_rhs else w
    x[sizes.sum() :] = d_out[sizes.sum() :] = np.nan

    def function(x, w):
        return grouped_matmul(x, w, sizes, transpose_rhs=transpose_rhs, implementation="xla")

    gradients = jax.jit(lambda x, w, d_out: jax.vjp(function, x, w)[1](d_out))
    d_x, d_w = map(np.asarray, gradients(x, w, d_out))
    wanted = oracle.grouped_matmul(d_out, w, sizes, transpose_rhs=not transpose_rhs)
    assert relative_error(d_x, wanted) < 1e-5
    starts = np.cumsum(sizes) - sizes
    for group, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        of_group = oracle.exact(x)[rows].T @ oracle.exact(d_out)[rows]
        found = d_w[group].T if transpose_rhs else d_w[group]
        np.testing.assert_allclose(found, of_group, atol=1e-4)


def test_a_caller_may_forbid_promotion_also_of_gradients_in_a_loop():
    x, w, sizes = draw(1, 6, 8), draw(2, 1, 3, 8, 8), jnp.array([3, 0, 2], jnp.int32)

    def loss(x, w):
        return jax.lax.scan(lambda x, w: (grouped_matmul(x, w, sizes), None), x, w)[0].sum()

    wanted = jax.grad(loss)(x, w)
    with strict_promotion():
        np.testing.assert_array_equal(jax.grad(loss)(x, w), wanted)


def test_no_array_has_rows_and_groups():
    sizes = np.array(SIZES[0], np.int32)

    def loss(x, w):
        return grouped_matmul(x, w, sizes, implementation="xla").sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((M, K), (7, K, N))]
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).as_text()
    assert f"{M}x7x" not in text and f"7x{M}x" not in text and f"x7x{K}x{M}" not in text


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("block", [8, 64, 128])
def test_tiles_hold_each_row_once_and_their_number_is_bounded(block, align):
    how = dict(block=block, align=align)
    run = jax.jit(lambda sizes: vars(tiles_of(Groups.of(sizes), num_rows=M, **how)))
    for sizes in SIZES:
        tiles = jax.device_get(run(np.int32(sizes)))
        (count,), fields, seen = tiles["count"], tiles["fields"], []
        assert count <= max_tiles(M, len(sizes), **how) == len(fields)
        for group, row, lo, hi in fields[:count]:
            assert row % align == 0 and 0 <= lo < hi <= block
            seen += [(group, row + i) for i in range(lo, hi)]
        owners = np.repeat(np.arange(len(sizes)), sizes)
        assert seen == list(zip(owners, range(len(owners)), strict=True))


@pytest.mark.parametrize("align", [1, 8])
def test_pairs_are_sorted_by_expert_in_their_order(align):
    indices = np.random.default_rng(5).integers(-2, 9, (200, 3)).astype(np.int32)
    pairs = jax.jit(lambda x: sort_pairs(x, 7, align=align))(indices)
    rows, of_row = np.asarray(pairs.rows).reshape(-1), np.asarray(pairs.pairs)
    starts = np.asarray(pairs.groups.starts)
    assert not (starts % align).any()
    for expert in range(7):
        wanted = np.flatnonzero(indices.reshape(-1) == expert)
        assert pairs.groups.sizes[expert] == len(wanted)
        place = starts[expert] + np.arange(len(wanted))
        assert (rows[wanted] == place).all() and (of_row[place] == wanted).all()
    outside = (indices.reshape(-1) < 0) | (indices.reshape(-1) >= 7)
    assert (rows[outside] == len(of_row)).all()
    assert (of_row == indices.size).sum() == len(of_row) - (~outside).sum()


X, W, GROUPS = jnp.zeros((8, 16)), jnp.zeros((2, 16, 24)), jnp.zeros(2, jnp.int32)


@pytest.mark.parametrize(
    ("args", "how", "message"),
    [
        ((X[0], W, GROUPS), {}, r"x.shape=\(16,\) must be \[M, K\]"),
        ((X, W.swapaxes(1, 2), GROUPS), {}, r"w.shape=\(2, 24, 16\) must be \[G, K, N\]"),
        ((X, W, GROUPS), dict(transpose_rhs=True), r"must be \[G, N, K\]"),
        ((X, W, GROUPS[:1]), {}, r"group_sizes must be int32\[2\]"),
        ((None, W, GROUPS), {}, "x=None must be an array"),
        ((X, "abc", GROUPS), {}, "w='abc' must be an array"),
        ((X, np.float64(W), GROUPS), {}, "w.dtype=float64 must be .* that of x, w"),
        ((X, W.astype(jnp.bfloat16), GROUPS), {}, "w.dtype=bfloat16 must be .* that of x, w"),
        ((X.astype(int), W.astype(int), GROUPS), {}, "x.dtype=int32 must be bfloat16, float16 or"),
        ((X, W, GROUPS), dict(transpose_rhs=1), "transpose_rhs=1 must be True or False"),
        ((X, W, GROUPS), dict(implementation="triton"), "implementation='triton' must be None or"),
        ((X, W, GROUPS), dict(interpret=True), "interpret=True needs a family of kernels"),
    ],
)
def test_what_does_not_fit_is_refused(args, how, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(*args, **how)


def test_a_named_implementation_never_falls_back():
    with pytest.raises(NotImplementedError, match="needs bfloat16 or float16, not float32"):
        grouped_matmul(X, W, GROUPS, implementation="mosaic_sm90")
    odd = jnp.zeros((8, 12), jnp.bfloat16), jnp.zeros((2, 12, 24), jnp.bfloat16), GROUPS
    with pytest.raises(NotImplementedError, match=r"multiples of 64, not \(12, 24\)"):
        grouped_matmul(*odd, implementation="mosaic_sm90")


# The kernel that plans few rows, interpreted, beside plain Python.

SHAPES = [(1, 4, 6), (5, 3, 7), (8, 8, 128), *slow([(2, 1, 3), (64, 8, 128), (64, 1, 32)])]


def plan_of(indices, num_experts, copied):
    """The fields of the tiles that count, and the row of each pair, `num_tiles` past the last."""
    experts = sorted({x for x in indices.flat if 0 <= x < num_experts})
    fields = np.zeros((len(experts), 5), np.int64)
    for tile, expert in enumerate(experts):
        bits = sum(1 << int(token) for token in np.flatnonzero((indices == expert).any(axis=1)))
        row = tile * copied
        fields[tile] = expert, row, row, bits & 0xFFFFFFFF, bits >> 32
    rows = np.full(indices.shape, min(num_experts, indices.size) * copied)
    for pair in np.ndindex(*indices.shape):
        if indices[pair] in experts:
            rows[pair] = experts.index(indices[pair]) * copied + pair[0]
    return fields.astype(np.int32), rows


@needs_triton
@pytest.mark.parametrize(("num_tokens", "k", "num_experts"), SHAPES)
def test_plan_of_few_rows(num_tokens, k, num_experts):
    """Of pairs some have no expert or the one of their neighbour, or few do, or none has any."""
    from pallas_paged.experts.kernels.few_rows_plan import few_rows_plan

    copied = -(-num_tokens // 8) * 8
    how = dict(num_experts=num_experts, copied=copied, interpret=True)
    plan = jax.jit(functools.partial(few_rows_plan, **how))
    rng = np.random.default_rng(0)
    for lo, hi in ((-2, num_experts + 3), (num_experts // 2, num_experts), (-1, 0)):
        indices = rng.integers(lo, hi, (num_tokens, k), dtype=np.int32)
        fields, count, rows = map(np.asarray, plan(indices))
        wanted, wanted_rows = plan_of(indices, num_experts, copied)
        assert count == [len(wanted)]
        np.testing.assert_array_equal(fields[: len(wanted)], wanted)
        assert (
            all(0 <= x < num_experts for x in fields[:, 0]) and not fields[len(wanted) :, 3:].any()
        )
        np.testing.assert_array_equal(rows, wanted_rows)
