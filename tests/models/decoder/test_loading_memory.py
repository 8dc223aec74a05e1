"""The memory that loading many small tensors takes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from models.decoder import Decoder, ModelConfig
from models.decoder.stored_tensors import tensors_of

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "models" / "goldens" / "qwen3_moe"
NUM_FILES = 3
# It loads a small checkpoint first, which imports and compiles, and then the one to measure from
# a new peak.
PROGRAM = """
import re, sys
from pathlib import Path
import jax
from flax import nnx
from models.decoder import load_checkpoint

def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

load_checkpoint(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
decoder, _ = load_checkpoint(sys.argv[2])
held = sum(x.nbytes for x in jax.tree.leaves(nnx.state(decoder)))
print(held, memory("VmHWM") - before)
"""


def save_experts(folder: Path) -> tuple[int, int]:
    """Save 64 experts in each of 8 layers; return the most bytes of a file and a parameter."""
    contents = json.loads((GOLDEN / "config.json").read_text())
    contents |= dict(num_local_experts=64, hidden_size=128, moe_intermediate_size=128)
    contents |= dict(num_hidden_layers=8, mlp_only_layers=[])
    (folder / "config.json").write_text(json.dumps(contents))
    config = ModelConfig.from_hugging_face(contents)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    params = [(path, param.shape) for path, param in nnx.to_flat_state(state)]
    shapes = [x for path, shape in params for x in tensors_of(path, shape, config)]
    where, sizes = {}, []
    for number in range(NUM_FILES):
        own = shapes[len(shapes) * number // NUM_FILES : len(shapes) * (number + 1) // NUM_FILES]
        file = folder / f"model-{number}.safetensors"
        save_file({name: np.full(shape, 0.5, np.float32) for name, shape in own}, file)
        where |= dict.fromkeys((name for name, _ in own), file.name)
        sizes.append(file.stat().st_size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return max(sizes), max(4 * math.prod(shape) for _, shape in params)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peaks")
@pytest.mark.slow  # a process that imports JAX, and 100 MB of files
def test_the_peak_is_less_than_a_file_and_a_parameter_above_the_parameters(tmp_path):
    file_bytes, param_bytes = save_experts(tmp_path)
    # glibc keeps what is freed unless it is mapped.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", PROGRAM, str(GOLDEN), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, check=True)
    held, grown = map(int, done.stdout.split())
    assert held > 2.5 * file_bytes
    assert held <= grown < held + file_bytes + param_bytes, (held, grown)
