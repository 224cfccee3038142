"""`refengine bench kernels --device cuda`, with the measurements made up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from kernels.dispatch import BackendError
from refengine.commands import bench_gpu
from refengine.commands.bench_kernels import run_bench
from refengine.errors import ConfigError

TIMED = {
    "kernel": "split",
    "num_seqs": 8,
    "context": 1024,
    "seconds": 2.5e-5,
    "bandwidth": 2e12,
    "share_of_copy": 0.5,
}
SKIPPED = {"kernel": "plain", "num_seqs": 64, "context": 32768, "skipped": "needs 21.5 GB of free memory"}
FAILED = {"kernel": "gather", "num_seqs": 64, "context": 1024, "error": "ValueError: [no]"}
LAUNCHES = [
    {"kernel": "split", "eager_seconds": 4e-5, "graph_seconds": 3e-6},
    {"kernel": "plain", "error": "gone"},
]


def test_without_a_gpu_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA GPU here"):
        run_bench("cuda", False, 1, None, Console(file=io.StringIO()))


def test_a_gpu_that_numba_does_not_find_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> None:
        raise BackendError("numba finds no GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_gpu, "CudaDevice", lambda: SimpleNamespace(name="cuda"))
    monkeypatch.setattr(bench_gpu, "check_device", refuse)
    with pytest.raises(ConfigError, match="numba finds no GPU"):
        bench_gpu.gpu()


@pytest.mark.parametrize(
    ("quick", "sizes"), [(True, ((1, 8), (1024, 8192))), (False, ((1, 8, 64), (1024, 8192, 32768)))]
)
def test_the_table_has_what_was_measured_and_why_something_was_not(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    quick: bool,
    sizes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    asked: dict[str, Any] = {}

    def rows(device: object, bandwidth: float, **sizes: Any) -> list[dict[str, Any]]:
        asked.update(sizes, bandwidth=bandwidth)
        return [TIMED, SKIPPED, FAILED]

    monkeypatch.setattr(bench_gpu, "gpu", lambda: None)
    monkeypatch.setattr(bench_gpu, "copy_bandwidth", lambda device: 4e12)
    monkeypatch.setattr(bench_gpu, "decode_rows", rows)
    monkeypatch.setattr(bench_gpu, "small_works", lambda device: {})
    monkeypatch.setattr(bench_gpu, "launch_rows", lambda device, works: LAUNCHES)
    console = Console(file=io.StringIO(), width=110)
    run_bench("cuda", quick, 1, tmp_path / "found.json", console)
    assert asked == {"bandwidth": 4e12, "num_seqs": sizes[0], "contexts": sizes[1]}
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for words in ("a copy reaches 4.00 TB/s", "8 x 1024", "25.0 us", "2.00", "50%", "needs 21.5 GB", "[no]"):
        assert words in text, words
    assert "Starting split costs the host 40.0 us from Python; in a graph it is done in 3.0 us." in text
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "copy_bandwidth": 4e12,
        "decode": [TIMED, SKIPPED, FAILED],
        "launch": LAUNCHES,
    }
