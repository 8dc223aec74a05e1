"""The code and the operands of an option are in a kernel only if the option is given."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_cases import Case

PER_HEAD = np.ones(4, np.float32)
CALLS = [(pp.paged_attention, Case()), (pp.ragged_paged_attention, Case(q_lens=(4, 1, 2)))]
# Per option: its value, the operands that it adds to the attention kernel and to the merge, and
# whether it changes the code of each.
OPTIONS = {
    "soft_cap": (2.0, [0, 0], [True, False]),
    "sliding_window": (20, [0, 0], [True, False]),
    "alibi_slopes": (PER_HEAD, [1, 0], [True, False]),
    # With them the merge has all rows. Without them it gets out and lse of those that are whole.
    "sinks": (PER_HEAD, [0, 1 - 2], [True, True]),
}
# The ragged kernel also finishes the tiles that one program has alone, so it applies the sinks.
RAGGED_OPTIONS = OPTIONS | {
    "causal": (False, [0, 0], [True, False]),
    "sinks": (PER_HEAD, [1, 1], [True, True]),
    "tree_mask": (np.ones((3, 4, 4), bool), [1, 0], [True, False]),
}


def equations(jaxpr):
    """All equations of a jaxpr and of those within it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=has_equations):
            if has_equations(value):
                yield from equations(value)


def has_equations(value):
    return hasattr(value, "eqns")


def kernels(function, case, **options):
    """(number of operands, primitives with their counts) of each kernel of a call."""

    def call(*arrays):
        return function(*arrays, implementation="triton_interpret", **options)

    calls = equations(jax.make_jaxpr(call)(*case.make()))
    calls = [equation for equation in calls if equation.primitive.name == "pallas_call"]
    assert len(calls) == 2
    return [
        (len(c.invars), Counter(e.primitive.name for e in equations(c.params["jaxpr"])))
        for c in calls
    ]


@pytest.mark.parametrize(
    ("function", "case", "name", "value", "operands", "code"),
    [
        (*call, name, *option)
        for call, options in zip(CALLS, (OPTIONS, RAGGED_OPTIONS), strict=True)
        for name, option in options.items()
    ],
)
def test_an_option_is_only_in_the_kernels_that_need_it(function, case, name, value, operands, code):
    plain, given = kernels(function, case), kernels(function, case, **{name: value})
    assert [b[0] - a[0] for a, b in zip(plain, given, strict=True)] == operands
    assert [b[1] != a[1] for a, b in zip(plain, given, strict=True)] == code


@pytest.mark.parametrize(("function", "case"), CALLS, ids=["decode", "ragged"])
def test_a_plain_block_has_two_products_and_two_exponentials(function, case):
    (_, plain), _ = kernels(function, case)
    (_, capped), _ = kernels(function, case, soft_cap=2.0)
    assert plain["exp2"] == plain["dot_general"] > 0
    assert not plain.keys() & {"tanh", "exp", "expm1", "logistic"}
    assert capped["exp2"] + capped["tanh"] > capped["dot_general"]
