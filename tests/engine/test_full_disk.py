"""A full disk for JAX's compilation cache: the engine goes on, with warnings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.commands import ROOT

# Most bytes of a file: a write beyond that fails as on a full disk, after a part of it.
SERVE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.engine_calls import greedy, make_engine, serve, tokens_of
engine = make_engine(modes=[SamplingMode()])
print(tokens_of(serve(engine, [[1, 2, 3]], greedy(max_tokens=5), check=False)))
"""


def serve(folder, most_bytes):
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-c", SERVE, str(most_bytes)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_a_full_disk_for_the_compilation_cache_costs_warnings_only(tmp_path):
    """Also later, when the entries are found that were cut off."""
    full, later = serve(tmp_path, 2000), serve(tmp_path, 10**9)
    assert "Error writing persistent compilation cache entry" in full.stderr
    assert "Error reading persistent compilation cache entry" in later.stderr
    assert full.stdout == later.stdout != ""
