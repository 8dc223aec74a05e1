"""The environment of the tests, and the fixtures that many of them share."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

from tests.support import without_triton  # isort: skip  # before JAX, which it may hide a part of

import jax
import pytest

from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.cpu_seconds import CpuSeconds
from tests.support.devices import implementations_here

MAX_CACHE_BYTES = 2**30

# `command &` of a script, nohup and cron start processes that ignore SIGINT, and so would every
# process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def set_in_jax(name: str, value: object) -> None:
    """Sets an option of JAX here and, through the environment, in programs that tests start."""
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)


def compilation_cache() -> str:
    """Returns a folder for compiled programs: the user's, so that every checkout shares it.

    Or one in the checkout, or one for this run alone, where those before can't be written.
    """
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for folder in Path(user, "pallas_paged", "tests"), Path(__file__).parents[1] / ".jax_cache":
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return str(folder)
        except OSError:
            continue
    folder = tempfile.mkdtemp(prefix="pallas_paged_tests_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# Compiling takes most of the time, so programs are optimized little and kept for the next run.
flags = ["--xla_cpu_parallel_codegen_split_count=1", "--xla_gpu_autotune_level=0"]
if jax.__version_info__ < (0, 11):  # later ones have no such flag
    flags.append("--xla_cpu_use_fusion_emitters=false")
flags.append("--xla_force_host_platform_device_count=8")  # for the tests of meshes; of CPUs only
os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
if jax.config.jax_compilation_cache_dir is None:
    set_in_jax("jax_compilation_cache_dir", compilation_cache())
    set_in_jax("jax_persistent_cache_min_compile_time_secs", 0)
    # XLA's own caches would be in the same folder, and its path a part of every key.
    set_in_jax("jax_persistent_cache_enable_xla_caches", "none")
# The processes of a run share the cores: a pool of threads in each would spend its time waiting. It
# is in force in the processes of xdist; here a plugin may have imported NumPy before.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # OpenBLAS and PyTorch read it
# The processes of a run share the GPU, and none gives back what it once had.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if (num_processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))) > 1:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / num_processes:.3f}")
# The threads of an interpreted Mosaic kernel wait for one another in callbacks, and each holds
# a thread of XLA's pool. By default the pool has a thread per core; with two, all may wait forever.
os.environ.setdefault("NPROC", "16")
if jax.default_backend() == "cpu":
    set_in_jax("jax_disable_most_optimizations", True)


if without_triton.is_hidden():
    collect_ignore = ["kernels/triton"]


def pytest_addoption(parser: pytest.Parser):
    CpuSeconds.add_options(parser)


def pytest_configure(config: pytest.Config):
    config.pluginmanager.register(CpuSeconds(config))
    if not hasattr(config, "workerinput"):
        delete_old_programs()


def delete_old_programs() -> None:
    """Deletes the older half of the compilation cache once it is too large; JAX deletes nothing."""
    folder = Path(jax.config.jax_compilation_cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with os.scandir(folder) as entries:
        found = sorted((x.stat().st_mtime, x.stat().st_size, x.path) for x in entries)
    if sum(size for _, size, _ in found) > MAX_CACHE_BYTES:
        for *_, path in found[: len(found) // 2]:
            Path(path).unlink(missing_ok=True)  # a run beside this one may delete, too


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """For `-n auto`: a process per core; not more than share one GPU well."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist takes that number
    return min(len(os.sched_getaffinity(0)), 16)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """On a GPU compiling takes most of the time even of one file: processes share its tests."""
    if jax.default_backend() == "gpu" and config.getoption("dist") == "loadfile":
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)
    return None


@pytest.fixture(params=implementations_here())
def implementation(request: pytest.FixtureRequest) -> str:
    """Every implementation that tests run on this machine, one after another."""
    return request.param


@pytest.fixture
def any_jax(monkeypatch):
    """Pretends that the JAX of this machine has the Mosaic GPU lowering."""
    monkeypatch.setattr(mosaic_support, "why_not_jax", lambda: None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function):
    """Skips a test of a Mosaic implementation that calls for something which it refuses to do.

    And where Triton is hidden, a test that calls for it.
    """
    try:
        return (yield)
    except NotImplementedError as e:
        if without_triton.is_hidden() and "needs the Triton lowering of Pallas" in str(e):
            pytest.skip(str(e))
        name = pyfuncitem.funcargs.get("implementation")
        if name not in ("mosaic_sm90", "mosaic_sm80"):
            raise
        if not str(e).startswith(f"implementation='{name}' "):  # JAX raises such errors too
            raise
        pytest.skip(str(e))


def pytest_collection_finish():
    """Keeps the garbage collector from rescanning modules and the objects of every trace."""
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


@pytest.fixture(autouse=True, scope="module")
def _few_memory_mappings():
    """Drops JAX's programs when they are many, for memory and Linux's 65,530 mappings."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 5_000:
        jax.clear_caches()


@pytest.fixture(scope="module")
def exact_products():
    """No TF32 on GPUs, where two computations of the same logits could choose different tokens.

    The setting holds in all threads; that of a context manager would not reach an engine's own.
    """
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture
def compilations():
    seen: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


# The imports are in the fixtures: tests of the library alone run without Flax.
@pytest.fixture(scope="module")
def model():
    from tests.support.dense_oracle import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A folder with a tiny model and a byte tokenizer, without a chat template."""
    from tests.support.commands import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def oracle(model):
    """The model without a cache, one row at a time."""
    from tests.support.dense_oracle import DenseOracle

    return DenseOracle(model)
