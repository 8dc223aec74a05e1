"""Fixtures: the implementations of attention that can run on this machine."""

from __future__ import annotations

import gc
import os

import jax
import pytest

from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.devices import implementations_here

# Compiling is nearly all the time that tests take, programs that they start included.
flags = ["--xla_cpu_parallel_codegen_split_count=1", "--xla_gpu_autotune_level=0"]
if jax.__version_info__ < (0, 11):  # later ones have no such flag
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
# Threads of an interpreted Mosaic kernel wait for one another in callbacks, each of which holds a
# thread of XLA's pool. It has as many as there are cores: with two, all may wait for ever.
os.environ.setdefault("NPROC", "16")
if jax.default_backend() == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


@pytest.fixture(params=implementations_here())
def implementation(request: pytest.FixtureRequest) -> str:
    """Every implementation that runs here, those for GPUs too; interpreted Mosaic is too slow."""
    return request.param


@pytest.fixture
def any_jax(monkeypatch):
    """Pretends that the JAX of this machine has the Mosaic GPU lowering."""
    monkeypatch.setattr(mosaic_support, "why_not_jax", lambda: None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """Skips what "mosaic_gpu" says that it can't do. A test that expects so has caught it."""
    try:
        return (yield)
    except NotImplementedError as e:
        if pyfuncitem.funcargs.get("implementation") != "mosaic_gpu":
            raise
        if not str(e).startswith("implementation='mosaic_gpu' "):  # JAX raises such errors too
            raise
        pytest.skip(str(e))


def pytest_collection_finish():
    """What has been imported stays: the garbage collector needn't look at it again and again."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module():
    """JAX keeps what it compiled, in more memory mappings than Linux allows a process."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def exact_products():
    """No TF32 on GPUs: two ways to the same logits must not choose different tokens."""
    with jax.default_matmul_precision("highest"):
        yield


# What these import is not there for the tests of the library alone.
@pytest.fixture(scope="module")
def model():
    """A decoder so small that every test of a module can have it."""
    from tests.support.dense_oracle import tiny_model

    return tiny_model()


@pytest.fixture(scope="module")
def split(model):
    """The model as jitted functions take it."""
    from flax import nnx

    return nnx.split(model)


@pytest.fixture(scope="module")
def oracle(model):
    """What the model says without a cache."""
    from tests.support.dense_oracle import DenseOracle

    return DenseOracle(model)
