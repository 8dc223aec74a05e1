"""The mask of visible keys, against its definition for each pair of query and key."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_paged.kernels.logits import LogitOptions, visible

KV_LEN, BEFORE, SIZE = 9, 6, 12  # tokens of the sequence, those older than its queries, all keys
TREE = np.random.default_rng(0).random((3, 3)) < 0.5


def sees(query, key, *, causal, window, tree):
    """Whether the query at this position sees a key."""
    in_window = window is None or key > query - window
    if tree:
        in_order = key < BEFORE or (key < KV_LEN and TREE[query - BEFORE, key - BEFORE])
    else:
        in_order = not causal or key <= query
    return key < KV_LEN and in_window and in_order


@pytest.mark.parametrize(
    ("causal", "window", "tree"), [*itertools.product((True, False), (None, 1, 4), (True, False))]
)
def test_a_key_is_visible_if_all_masks_let_it_through(causal, window, tree):
    keys, positions = jnp.arange(SIZE)[None, :], jnp.arange(BEFORE, KV_LEN)[:, None]
    in_tree = np.ones((3, SIZE), bool)
    in_tree[:, BEFORE:KV_LEN] = TREE
    found = visible(
        keys,
        positions,
        LogitOptions(sm_scale=1.0, sliding_window=window, causal=causal),
        end=KV_LEN,
        last=positions if causal and not tree else None,
        tree=(lambda: jnp.asarray(in_tree)) if tree else None,
    )
    masks = dict(causal=causal, window=window, tree=tree)
    wanted = [[sees(q, k, **masks) for k in range(SIZE)] for q in range(BEFORE, KV_LEN)]
    np.testing.assert_array_equal(jnp.broadcast_to(found, (3, SIZE)), wanted)


def test_without_masks_all_keys_are_visible():
    assert visible(jnp.arange(4), None, LogitOptions(sm_scale=1.0)).all()
