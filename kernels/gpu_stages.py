"""The stages of `device_check`, each as the rows that it finds. They run on the current GPU."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kernels import gpu_bench, gpu_cases
from kernels.cuda import check_device
from kernels.gpu_device import CudaDevice

PACKAGES = ("torch", "numba", "numba-cuda", "cuda-bindings", "cuda-core", "nvidia-nvvm", "nvidia-cuda-nvrtc")
LIBRARIES = ("nvvm", "nvrtc", "nvJitLink")
Row = dict[str, Any]


def versions() -> Iterator[Row]:
    """One row per thing: what it is, and its version or how it was found."""
    yield {"what": "python", "found": platform.python_version()}
    for package in PACKAGES:
        try:
            yield {"what": package, "found": version(package)}
        except PackageNotFoundError:
            yield {"what": package, "found": "not installed"}
    yield {"what": "CUDA of torch", "found": str(torch.version.cuda)}
    yield {"what": "driver", "found": _driver()}
    for name in LIBRARIES:
        yield {"what": f"lib{name.lower()}", "found": _library(name)}
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    yield {"what": "GPU", "found": gpu.name}
    yield {"what": "compute capability", "found": f"{gpu.major}.{gpu.minor}"}
    yield {"what": "multiprocessors", "found": gpu.multi_processor_count}
    yield {"what": "memory, bytes", "found": gpu.total_memory}
    yield {"what": "L2 cache, bytes", "found": gpu.L2_cache_size}


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown: there is no nvidia-smi"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() or f"unknown: nvidia-smi says {done.stderr.strip()!r}"


def _library(name: str) -> str:
    """The file and how it was found, but not where: the result may be published. Numba looks in the same places."""
    try:
        library = import_module("cuda.pathfinder").load_nvidia_dynamic_lib(name)
        return f"{Path(library.abs_path).name}, by {library.found_via}"
    except Exception as error:  # not installed, not found, found and broken
        return f"not found: {type(error).__name__}"


def correctness() -> Iterator[Row]:
    """Every kernel at small shapes against the float64 reference."""
    device = CudaDevice()
    check_device(device.name)
    for case in gpu_cases.CASES:
        yield case.row(device.name)


def decode() -> Iterator[Row]:
    """The copy that is the yardstick, then the decode kernels and torch's way at every size."""
    device = CudaDevice()
    bandwidth = gpu_bench.copy_bandwidth(device)
    yield {"kernel": "copy", "bandwidth": bandwidth}
    yield from gpu_bench.decode_rows(device, bandwidth)


def launch() -> Iterator[Row]:
    """What it costs to start a kernel that has next to nothing to do, and an operation of torch beside it."""
    device = CudaDevice()
    yield from gpu_bench.launch_rows(device, gpu_bench.small_works(device))


STAGES: dict[str, Callable[[], Iterator[Row]]] = {
    "versions": versions,
    "correctness": correctness,
    "decode": decode,
    "launch": launch,
}
