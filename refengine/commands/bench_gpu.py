"""`refengine bench kernels --device cuda`: the decode kernels beside what torch offers, on this machine's GPU.

The measuring is that of `kernels.device_check`, which looks at more; this is the table alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kernels.cuda import check_device
from kernels.dispatch import BackendError
from kernels.gpu_bench import CONTEXTS, NUM_SEQS, Row, copy_bandwidth, decode_rows, launch_rows, small_works
from kernels.gpu_decode import KERNELS
from kernels.gpu_device import CudaDevice, Device
from refengine.errors import ConfigError


def run_gpu_bench(quick: bool, json_file: Path | None, console: Console) -> None:
    """Measures and prints one row per kernel and size. Raises: ConfigError if the kernels cannot run here."""
    device = gpu()
    num_seqs, contexts = (NUM_SEQS[:2], CONTEXTS[:2]) if quick else (NUM_SEQS, CONTEXTS)
    rows = []
    with Progress(console=console, transient=True) as progress, torch.inference_mode():
        task = progress.add_task("measuring", total=len(KERNELS) * len(num_seqs) * len(contexts))
        bandwidth = copy_bandwidth(device)
        for row in decode_rows(device, bandwidth, num_seqs=num_seqs, contexts=contexts):
            rows.append(row)
            progress.advance(task)
        launches = list(launch_rows(device, small_works(device)))
    console.print(table(rows, bandwidth))
    for row in launches:
        console.print(escape(launch_sentence(row)))
    if json_file is not None:
        found = {"copy_bandwidth": bandwidth, "decode": rows, "launch": launches}
        json_file.write_text(json.dumps(found, indent=1) + "\n")


def gpu() -> Device:
    """Raises: ConfigError if there is none, for torch or for numba."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda' was asked for, but torch sees no CUDA GPU here; `refengine doctor` tells more"
        )
    device = CudaDevice()
    try:
        check_device(device.name)
    except BackendError as error:
        raise ConfigError(str(error)) from error
    return device


def table(rows: list[Row], bandwidth: float) -> Table:
    """One row per kernel and size; in place of numbers, why there are none."""
    title = f"Decode attention of one layer in a CUDA graph; a copy reaches {bandwidth / 1e12:.2f} TB/s"
    result = Table(title=title, title_justify="left")
    for heading in ("sequences x tokens", "kernel", "time", "TB/s", "of a copy"):
        result.add_column(heading, justify="left" if heading in ("sequences x tokens", "kernel") else "right")
    for row in rows:
        size = f"{row['num_seqs']} x {row['context']}"
        if "seconds" in row:
            time, speed = f"{row['seconds'] * 1e6:.1f} us", f"{row['bandwidth'] / 1e12:.2f}"
            result.add_row(size, row["kernel"], time, speed, f"{row['share_of_copy']:.0%}")
        else:
            result.add_row(size, row["kernel"], escape(row.get("skipped") or row["error"]), "", "")
    return result


def launch_sentence(row: Row) -> str:
    """What starting this kernel costs."""
    if "error" in row:
        return f"{row['kernel']}: {row['error']}"
    eager, graph = row["eager_seconds"] * 1e6, row["graph_seconds"] * 1e6
    return (
        f"Starting {row['kernel']} costs the host {eager:.1f} us from Python; "
        f"in a graph it is done in {graph:.1f} us."
    )
