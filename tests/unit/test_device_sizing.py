"""How many blocks there are, with a GPU that says what it is told to say."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from kernels import cuda, gpu_stages
from kernels.dispatch import BackendError
from refengine import gpu, sizing
from refengine.commands import doctor
from refengine.commands.demo import DemoOptions, run_demo
from refengine.config import EngineConfig
from refengine.errors import ConfigError
from refengine.kv_cache import block_bytes
from refengine.model.decoder import Decoder
from refengine.sizing import CPU_BYTES, MOST_BLOCKS, choose_num_blocks, largest_step
from tests.unit.hybrid_models import make_hybrid
from tests.unit.models import make_decoder

GIB = 2**30


def on_gpu(decoder: Decoder) -> Any:
    """The same network, as one that lies on a GPU."""
    weight = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    return SimpleNamespace(config=decoder.config, embed_tokens=SimpleNamespace(weight=weight))


def pretend(monkeypatch: pytest.MonkeyPatch, free: int, total: int, peak: int = 0) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda device: (free, total))
    monkeypatch.setattr(sizing, "peak_bytes", lambda work, device: peak)


def test_on_a_cpu_it_is_a_fixed_size() -> None:
    decoder = make_decoder()
    one = block_bytes(decoder.config, 16, torch.float32)
    assert choose_num_blocks(EngineConfig(), decoder) == CPU_BYTES // one
    assert choose_num_blocks(EngineConfig(kv_cache_bytes=5 * one), decoder) == 5
    assert choose_num_blocks(EngineConfig(kv_cache_bytes=5 * one, num_blocks=7), decoder) == 7


def test_on_a_gpu_it_is_what_is_left_of_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 blocks' worth of memory 20 are in use and a step needs 15: of a share of 80 there remain 45."""
    decoder = make_decoder()
    one = block_bytes(decoder.config, 16, torch.float32)
    pretend(monkeypatch, free=80 * one, total=100 * one, peak=15 * one)
    assert choose_num_blocks(EngineConfig(gpu_memory_utilization=0.8), on_gpu(decoder)) == 45
    assert choose_num_blocks(EngineConfig(kv_cache_bytes=6 * one), on_gpu(decoder)) == 6
    assert choose_num_blocks(EngineConfig(num_blocks=9), on_gpu(decoder)) == 9


def test_a_small_model_does_not_get_millions_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, free=139 * GIB, total=140 * GIB)
    assert choose_num_blocks(EngineConfig(), on_gpu(make_decoder())) == MOST_BLOCKS


def test_a_full_gpu_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, free=1 * GIB, total=10 * GIB, peak=GIB // 2)
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(EngineConfig(), on_gpu(make_decoder()))
    assert str(caught.value) == (
        "gpu_memory_utilization 0.9 leaves no room for a KV cache: of 9.00 GiB there are 9.00 GiB in use, "
        "a step needs 0.50 GiB, and two blocks 0.00 GiB"
    )


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match=f"above 0 and at most 1, not {share}"):
        EngineConfig(gpu_memory_utilization=share)


@pytest.mark.parametrize("make", [make_decoder, make_hybrid])
def test_the_largest_step_has_as_many_tokens_as_may_be(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, seen = make(), []
    monkeypatch.setattr(decoder, "forward", _counting(decoder.forward, seen))
    scores = largest_step(EngineConfig(max_num_batched_tokens=50, max_num_seqs=8), decoder)
    assert seen == [50] and scores.shape == (8, decoder.config.vocab_size)


def _counting(forward: Any, seen: list[int]) -> Any:
    def count(tokens: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(len(tokens))
        return forward(tokens, *rest, **options)

    return count


def test_the_peak_is_counted_from_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(allocated=100, peak=900)

    def work() -> None:
        now.peak = 350

    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: setattr(now, "peak", now.allocated)
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: now.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: now.peak)
    assert gpu.peak_bytes(work, torch.device("cuda")) == 250


# -- commands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid"])
def test_a_demo_without_a_gpu_is_one_sentence(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA GPU here"):
        run_demo(DemoOptions(model, device="cuda"), Console(file=io.StringIO()))


FACTS = {
    "GPU": "Some GPU",
    "memory, bytes": 140 * GIB,
    "driver": "570.1",
    "CUDA of torch": "13.0",
    "numba-cuda": "0.30.4",
    "libnvvm": "libnvvm.so.4, by pip",
}


def test_doctor_tells_what_the_gpu_is_and_what_compiles_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = [{"what": what, "found": found} for what, found in FACTS.items()]
    monkeypatch.setattr(gpu_stages, "versions", lambda: iter(rows))
    monkeypatch.setattr(cuda, "check_device", lambda device: None)
    assert doctor._gpu() == [
        doctor.Finding("GPU", "Some GPU, 140 GiB, driver 570.1, CUDA 13.0 in torch"),
        doctor.Finding("CUDA kernels", "numba-cuda 0.30.4, libnvvm libnvvm.so.4, by pip"),
    ]


def test_doctor_on_a_gpu_that_numba_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> None:
        raise BackendError("numba finds no GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = [{"what": what, "found": found} for what, found in FACTS.items()]
    monkeypatch.setattr(gpu_stages, "versions", lambda: iter(rows))
    monkeypatch.setattr(cuda, "check_device", refuse)
    assert doctor._gpu()[1] == doctor.Finding("CUDA kernels", "numba finds no GPU")


def test_doctor_survives_a_driver_that_is_half_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_stages, "versions", fail)
    assert doctor._gpu() == [doctor.Finding("GPU", "there is one, but RuntimeError: no device")]


def test_doctor_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor._gpu() == [doctor.Finding("GPU", "none that torch can use")]
