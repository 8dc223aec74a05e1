"""The suite itself runs wherever it is started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
NOBODY = 65534


def test_ctrl_c_interrupts_a_test():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_child_reads_what_it_is_given():
    child = subprocess.run(["cat"], input=b"words", capture_output=True, check=True)
    assert child.stdout == b"words"


def test_compiled_programs_have_a_folder():
    path = Path(jax.config.jax_compilation_cache_dir, f"test_start_{os.getpid()}")
    path.write_text("")
    path.unlink()
    assert jax.config.jax_persistent_cache_enable_xla_caches == "none"


def is_open_to_others(path: Path) -> bool:
    return all(x.stat().st_mode & 1 for x in [path, *path.parents] if x.is_dir())


@pytest.mark.cpu_budget(8)  # a process of its own
def test_suite_runs_in_the_background_without_input_and_without_a_home(tmp_path):
    """As `nohup python -m pytest <&- &` runs it: by another user, if root may become one."""
    options = {}
    folders = [ROOT, Path(sys.prefix), Path(sys.executable).resolve().parent]
    if os.getuid() == 0 and all(is_open_to_others(folder) for folder in folders):
        options = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cache").touch()  # root may write into any folder, but not into a file
    home.chmod(0o555)
    names = ["JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "PYTEST_XDIST_WORKER"]
    environment = {name: x for name, x in os.environ.items() if name not in names}
    pytest_command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@" <&-', "sh", *pytest_command, "-k", "not suite"],
        cwd=ROOT,
        env=environment | {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed" in run.stdout
