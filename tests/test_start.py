"""The tests run wherever they are started: in the background, without stdin and without a HOME."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# As nohup and cron start programs: SIGINT is ignored, stdin is closed.
IN_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@" <&-', "sh"]
TEST = "tests/engine/test_interrupt.py"  # interrupts its own process
LEFT_OUT = ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "PYTEST_ADDOPTS", "PYTEST_XDIST")


@pytest.mark.slow  # two processes import JAX
def test_tests_run_in_the_background_without_stdin_and_without_a_home(tmp_path):
    home = tmp_path / "home"
    home.touch()  # no folder, so that not even root can write into it
    env = {name: x for name, x in os.environ.items() if not name.startswith(LEFT_OUT)}
    env |= dict(HOME=str(home), TMPDIR=str(tmp_path), JAX_PLATFORMS="cpu")
    command = [sys.executable, "-m", "pytest", "-n", "1", TEST, "-k", "second_interrupt"]
    how = dict(cwd=ROOT, env=env, capture_output=True, text=True)
    run = subprocess.run([*IN_BACKGROUND, *command], **how)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
