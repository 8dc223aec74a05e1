"""The calls that tools look at run every kernel, on a GPU with equal bits."""

import contextlib
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged
from tests.support.devices import H200_MESH
from tests.support.kernel_calls import kernel_calls
from tests.support.marks import needs_triton
from tests.support.repeats import largest_error, repeat

ROOT = Path(pallas_paged.__file__).parent
NAME = re.compile(r'^ +(?:kernel_)?name="([a-z_]{4,})",$', re.MULTILINE)
# The family whose calls run the kernels of a folder, or of a module.
FAMILIES = {
    "kernels": "triton",
    "kernels/mosaic": "mosaic_sm90",
    "kernels/mosaic_sm80": "mosaic_sm80",
    "kernels/mosaic_sm90": "mosaic_sm90",
    "kernels/triton": "triton",
    "kernels/triton/backward_pages.py": "mosaic_sm90",
    "decoder/kernels": "mosaic_sm90",
    "decoder/kernels/latent_write.py": "triton",
    "decoder/kernels/rotary_write.py": "triton",
    "engine/sampling": "triton",
    "experts/kernels": "mosaic_sm90",
}
NOT_ALONE = ("decoder/kernels/all_reduce.py",)  # which needs several GPUs
MODULES = [
    name
    for path in sorted(ROOT.rglob("*.py"))
    if NAME.search(path.read_text())
    if (name := str(path.relative_to(ROOT))) not in NOT_ALONE
]


def collect_names(value, names, seen):
    """Add the names of all equations of a jaxpr, and of those inside of them."""
    if isinstance(value, tuple | list):
        for one in value:
            collect_names(one, names, seen)
    jaxpr = getattr(value, "jaxpr", value)
    if not hasattr(jaxpr, "eqns") or id(jaxpr) in seen:
        return
    seen[id(jaxpr)] = jaxpr  # kept, or another might get its id
    for equation in jaxpr.eqns:
        names |= {str(param) for key, param in equation.params.items() if "name" in key}
        collect_names(list(equation.params.values()), names, seen)


@functools.cache
def names_of(call):
    """The names that a call traces to, one in a line."""
    names = set()
    with contextlib.suppress(NotImplementedError), jax.sharding.use_abstract_mesh(H200_MESH):
        collect_names(jax.jit(call.run).trace(*call.shapes()).jaxpr, names, {})
    return "\n".join(names)


# Those of other functions first: fewer calls are traced until one has a name.
CALLS = sorted(kernel_calls(), key=lambda call: len(call.name.split()))


@needs_triton
@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_is_run(module):
    if jax.__version_info__ < (0, 11):
        pytest.skip("later JAX traces the kernels of every family")
    family = FAMILIES.get(module) or FAMILIES[module.rpartition("/")[0]]
    for name in NAME.findall((ROOT / module).read_text()):
        assert any(name in names_of(call) for call in CALLS if call.family == family), name


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="runs kernels on a GPU")
@pytest.mark.parametrize("call", kernel_calls(), ids=str)
def test_1000_runs_give_the_same_bits_and_agree_with_xla(call):
    arrays = call.make()
    try:
        found, others = repeat(call.run, arrays, 1000)
    except NotImplementedError as e:
        pytest.skip(str(e))
    assert others == 0
    reference = jax.jit(functools.partial(call.function, implementation="xla"))
    assert largest_error(found, reference(*arrays)) <= call.tolerance


def test_runs_with_other_bits_are_counted():
    """Of a function that is called again in every run, and gives 3, 3, 4, 3, 4 and so on."""
    values = itertools.chain([3.0], itertools.cycle([3.0, 4.0]))

    def function(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x + jax.pure_callback(lambda _: np.float32(next(values)), shape, x)

    first, others = repeat(function, (jnp.float32(1.0),), 10)
    assert first == 4 and others == 5
