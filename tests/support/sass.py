"""The machine code of kernels, compiled for a GPU on a machine without one.

It needs the CUDA plugin of JAX and NVIDIA's compilers as wheels: the extra "sass" of the project.
`JAX_PLATFORMS=cpu python -m tests.support.sass` prints the registers, spills and shared memory of
every kernel; bench/notes/compilers.md has some of them.
"""

import dataclasses
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding
from jaxlib.mlir import ir

from pallas_paged.kernels.device import Device
from pallas_paged.kernels.families import FAMILIES
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.kernel_calls import gpt_oss_layer, kernel_calls
from tests.support.programs import Program, kernel_configs, operations, parsed

# What XLA wants to know of a GPU. Only the compute capability, the number of SMs and the shared
# memory change what it does here.
_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_memory}
  shared_memory_per_block_optin: {shared_memory}
  core_count: {num_sms} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 2000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.5
  device_memory_size: 40000000000 device_address_bits: 64
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  device_vendor: "NVIDIA Corporation" name: "{kind}" model_str: "{kind}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{kind}"
"""
# XLA's own kernels have other names.
_OURS = re.compile(
    r"paged_decode|ragged_|mla_|attention_gradient|rotate_and_write|sampling_"
    r"|between_attentions|grouped_|few_rows_"
)
_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores")
_REGISTERS = re.compile(r"Used (\d+) registers")
_TRITON_SHARED = re.compile(r"kCustomKernel.*\] (\w+) grid: .* shared_memory: (\d+) bytes")


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    capability: str
    kind: str
    num_sms: int
    shared_memory: int  # bytes of a program, at most

    @property
    def arch(self) -> tuple[int, ...]:
        return tuple(map(int, self.capability.split(".")))

    @property
    def device(self) -> Device:
        """The device that the library chooses for."""
        sizes = dict(num_sms=self.num_sms, compute_capability=self.capability)
        return Device(platform="gpu", kind=self.kind, **sizes)

    @property
    def config(self) -> str:
        """The target as XLA wants it: a GpuTargetConfigProto."""
        major, minor = self.arch
        extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        numbers = dataclasses.asdict(self)
        return _TARGET.format(major=major, minor=minor, extension=extension, **numbers)


TARGETS = {
    capability: Target(capability, kind, num_sms, shared_memory)
    for capability, kind, num_sms, shared_memory in (
        ("8.0", "NVIDIA A100", 108, 166912),
        ("8.6", "NVIDIA A10", 72, 101376),
        ("8.9", "NVIDIA L4", 58, 101376),
        ("9.0", "NVIDIA H200", 132, 232448),
        ("10.0", "NVIDIA B200", 148, 232448),
        ("12.0", "NVIDIA RTX PRO 6000", 188, 101376),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a kernel uses: registers of a thread, bytes of a thread that it spills, shared bytes."""

    kernel: str
    registers: int
    spills: int
    shared_memory: int


def cuda_root() -> Path | None:
    """Return the folder of NVIDIA's compilers in this environment, or None."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    roots = [Path(place, "cu13") for place in places or ()]
    return next((root for root in roots if (root / "bin" / "ptxas").exists()), None)


@contextmanager
def compiler(root: Path) -> Iterator[Callable[..., list[Usage]]]:
    """Give a function that compiles a function of arrays for a target.

    It has a ptxas that also writes what it prints into a file.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, fake = folder / "log", folder / "cuda"
        (fake / "bin").mkdir(parents=True)
        for path in [*(p for p in root.iterdir() if p.name != "bin"), *(root / "bin").iterdir()]:
            (fake / path.relative_to(root)).symlink_to(path)
        ptxas = fake / "bin" / "ptxas"
        ptxas.unlink()
        ptxas.write_text(
            f'#!/bin/sh\n{root}/bin/ptxas -v "$@" 2> {log}.$$\nstatus=$?\n'
            f"cat {log}.$$ >> {log}\ncat {log}.$$ >&2\nexit $status\n"
        )
        ptxas.chmod(0o755)

        def compile_for(target: Target, function: Callable[..., Any], *shapes: Any) -> list[Usage]:
            log.write_text("")
            one = dict(target_config=target.config, topology="1x1x1")
            topology = topologies.get_topology_desc("", platform="cuda", **one)
            sharding = SingleDeviceSharding(topology.devices[0])
            shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
            placed = jax.tree.map(lambda x: shape(x.shape, x.dtype), shapes)
            dump = folder / "dump"
            lowered = _lower(target, function, placed)
            lowered.compile(
                compiler_options={
                    "xla_gpu_cuda_data_dir": str(fake),
                    "xla_gpu_enable_libnvptxcompiler": False,  # but the program above
                    "xla_gpu_autotune_level": 0,
                    "xla_dump_to": str(dump),
                }
            )
            shared = _mosaic_shared(lowered)
            for path in dump.glob("*thunk_sequence.txt"):
                shared |= dict(_TRITON_SHARED.findall(path.read_text()))
                path.unlink()
            return list(usages_of(log.read_text(), target, shared))

        # A program from the cache would not be compiled; and the code is that of full optimization.
        settings = {"jax_compilation_cache_dir": None, "jax_disable_most_optimizations": False}
        before = {
            "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir,
            "jax_disable_most_optimizations": jax.config.read("jax_disable_most_optimizations"),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{fake}/bin", prepend=os.pathsep)
            patch.setenv("MOSAIC_GPU_CUDA_ROOT", str(fake))
            _set(settings)
            try:
                yield compile_for
            finally:
                _set(before)


def _set(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()


def _mosaic_shared(lowered: jax.stages.Lowered) -> dict[str, str]:
    """The bytes of shared memory of each Mosaic kernel, which ptxas and XLA do not know."""
    found: dict[str, str] = {}
    for config in kernel_configs(lowered):
        if "module" not in config:
            continue
        with parsed(config["module"]) as module:
            name = ir.StringAttr(module.attributes["sym_name"]).value
            for op in operations(module, "gpu.launch"):
                # Dependencies, 3 sizes each of the grid, the block and the cluster, then this one.
                counts = list(ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"]))
                constant = op.operands[sum(counts[:10])].owner
                found[name] = str(ir.IntegerAttr(constant.attributes["value"]).value)
    return found


def _lower(target: Target, function: Callable[..., Any], shapes: Any) -> jax.stages.Lowered:
    """Lowers for a target, whatever this machine has."""
    abstract = AbstractDevice(device_kind=target.kind, platform="gpu", num_cores=target.num_sms)
    mesh = AbstractMesh((1,), ("x",), abstract_device=abstract)
    with pytest.MonkeyPatch.context() as patch, jax.sharding.use_abstract_mesh(mesh):
        patch.setattr(Device, "here", lambda: target.device)
        if mosaic_support.why_not_jax() is None:
            # JAX takes (9, 0) for a device that is abstract.
            patch.setattr("jax.experimental.mosaic.gpu.utils._infer_arch", lambda: target.arch)
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))


def usages_of(log: str, target: Target, shared: dict[str, str]) -> Iterator[Usage]:
    """What ptxas printed of each kernel."""
    arch = target.capability.replace(".", "")
    for part in log.split("ptxas info    : 0 bytes gmem")[1:]:
        entry, spills, registers = (x.search(part) for x in (_ENTRY, _SPILLS, _REGISTERS))
        if not (entry and spills and registers):
            continue
        assert entry["arch"].rstrip("a") == arch, f"compiled for sm_{entry['arch']}, not {arch}"
        kernel = entry["name"].removesuffix("_kernel").removesuffix("_mosaic_gpu")
        sizes = dict(spills=int(spills[1]), shared_memory=int(shared.get(kernel, 0)))
        yield Usage(kernel=kernel, registers=int(registers[1]), **sizes)


def real_programs() -> list[Program]:
    """Attention calls of real sizes, which get larger tiles than small ones do."""
    found = []
    for family in FAMILIES:
        add = partial(Program, implementation=family)
        decode = partial(add, function="decode", num_seqs=64)
        ragged = partial(add, function="ragged", num_tokens=4096)
        for head_dim in (64, 128, 256, *[512] * (family == "mosaic_sm80")):
            found.append(ragged(head_dim=head_dim))
            if family != "mosaic_sm90":  # which decodes by the kernel of mosaic_sm80
                found.append(decode(head_dim=head_dim))
        found.append(ragged(num_seqs=64, num_tokens=192))
        if family != "triton":  # prompts of DeepSeek
            found.append(ragged(num_kv_heads=32, head_dim=192, v_head_dim=128))
        if family == "mosaic_sm80":  # other numbers of programs, blocks and columns than above
            found.append(decode(num_seqs=1, max_kv_len=8192))
        found += [ragged(kv_dtype=kv_dtype) for kv_dtype in ("int8", "float8_e4m3fn")]
    return found


def large_programs(target: Target) -> list[Program]:
    """Calls whose tiles must be smaller on a target with less shared memory than Hopper has."""
    large = dict(function="ragged", implementation="triton", num_tokens=4096, head_dim=256)
    dtypes = {"8.0": ["float32"], "8.6": ["bfloat16", "float32"]}
    return [Program(dtype=dtype, **large) for dtype in dtypes.get(target.capability, ())]


# For all targets: one call of each kernel that reads pages or writes them. Not of Mosaic, which
# compiles for no higher target than the first one of a process.
FOR_ALL_TARGETS = ("decode bfloat16", "decode int8", "ragged float8_e4m3fn", "rotary write int8")
# Their kernels are those of decode and ragged calls with such pages.
MADE_OF_OTHERS = ("cascade int8", "cascade float8_e4m3fn", "cascade with options")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A call to compile for a target."""

    target: Target
    name: str
    function: Callable[..., Any]
    shapes: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.target.capability} {self.name}"


def compilations() -> list[Compilation]:
    """Every kernel and calls of real sizes for 9.0; some of both for the other targets."""
    found = []
    for target in TARGETS.values():
        all_kernels = target.capability == "9.0"
        found += [
            Compilation(target, str(call), call.run, call.shapes())
            for call in kernel_calls()
            if (all_kernels and call.name not in MADE_OF_OTHERS)
            or (call.family == "triton" and call.name in FOR_ALL_TARGETS)
        ]
        if all_kernels:
            found.append(Compilation(target, "mosaic_sm90 a layer of gpt-oss", *gpt_oss_layer()))
        for program in real_programs() if all_kernels else large_programs(target):
            function, shapes = program.call_and_shapes()
            found.append(Compilation(target, program.name, function, (shapes,)))
    return found


def kernels_of(usages: Sequence[Usage]) -> list[Usage]:
    """Those of this library: XLA's kernels have other names."""
    return [usage for usage in usages if _OURS.match(usage.kernel)]


def main() -> None:
    """Print a table of kernels; of code with the same numbers, the first call that has it.

    Merges and plans that spill nothing are left out.
    """
    root = cuda_root()
    if root is None:
        sys.exit("this environment has no CUDA compilers: pip install '.[sass]'")
    print("| target | call | kernel | registers | bytes spilled | KB of shared memory |")
    print("|---|---|---|---|---|---|")
    seen = set()
    with compiler(root) as compile_for:
        for one in compilations():
            try:
                usages = compile_for(one.target, one.function, *one.shapes)
            except NotImplementedError:
                continue
            for x in sorted(kernels_of(usages), key=lambda x: x.kernel):
                family = one.name.split()[0]
                if x.kernel.endswith(("_merge", "_plan")) and not x.spills:
                    continue
                if (one.target, family, x) not in seen:
                    seen.add((one.target, family, x))
                    numbers = f"{x.registers} | {x.spills} | {x.shared_memory / 1024:.0f}"
                    place = f"{one.target.capability} | {one.name}"
                    print(f"| {place} | `{x.kernel}` | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
