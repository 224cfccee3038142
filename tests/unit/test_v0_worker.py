"""The worker: memory orders first and in order, then the model; one kernel for prompts, one for decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernels
from refengine.errors import RequestError
from refengine.kv_cache import KVCache
from refengine.v0.scheduler_output import SchedulerOutputs
from refengine.v0.sequence import SequenceGroupMetadata
from refengine.v0.worker import Worker
from tests.unit.helpers import Marks, numbers
from tests.unit.models import greedy, make_decoder
from tests.unit.test_v0_model_input import group


class Spy:
    """A kernel backend that computes nothing new and keeps, by layer, which operations it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.slots: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name == "plan_step":
            raise AttributeError(name)  # it prepares nothing, so every layer asks for its operation

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name == "reshape_and_cache":
                self.slots = arguments[4].tolist()
            return getattr(kernels, name)(*arguments)

        return call


def make(virtual_engines: int = 1, cpu: bool = True, **options: Any) -> tuple[Worker, Spy]:
    decoder, spy = make_decoder(), Spy()
    gpu = [KVCache(decoder.config, 8, 4) for _ in range(virtual_engines)]
    cpus = [KVCache(decoder.config, 4, 4) if cpu else None for _ in range(virtual_engines)]
    return Worker(decoder, gpu, cpus, backend=spy, **options), spy  # type: ignore[arg-type]


def run(worker: Worker, *groups: SequenceGroupMetadata, ve: int = 0, **orders: Any) -> dict[str, list[int]]:
    return worker.execute(groups, SchedulerOutputs(**orders), ve).sampled


def stamp(cache: KVCache, block_id: int, value: float) -> None:
    for tensor in (tensor for layer in cache.layers for tensor in layer):
        tensor[block_id] = value


def stamps(cache: KVCache, *block_ids: int) -> list[float]:
    """What is in the first slot of each block; all layers agree."""
    firsts = {
        tuple(float(tensor[b].flatten()[0]) for b in block_ids) for layer in cache.layers for tensor in layer
    }
    (values,) = firsts
    return list(values)


def test_a_prompt_alone_reads_no_page() -> None:
    worker, spy = make()
    assert run(worker, group("A", numbers(1, 6), [5, 2], skip=[])) == {
        "A": greedy(worker.model, numbers(1, 6), 1)
    }
    assert set(spy.calls) == {"reshape_and_cache"}
    assert spy.slots == [20, 21, 22, 23, 8, 9]


def test_a_hit_is_read_from_pages() -> None:
    worker, spy = make()
    prompt = numbers(1, 7)
    run(worker, group("A", prompt, [5, 2], skip=[]))
    spy.calls.clear()
    assert run(worker, group("B", prompt, [5, 3], skip=[5])) == {"B": greedy(worker.model, prompt, 1)}
    assert set(spy.calls) == {"reshape_and_cache", "paged_attention"}
    assert spy.slots == [12, 13, 14]


def test_one_hit_sends_everybody_through_the_pages() -> None:
    worker, spy = make()
    run(worker, group("A", numbers(1, 7), [5, 2], skip=[]))
    spy.calls.clear()
    sampled = run(worker, group("B", numbers(1, 7), [5, 3], skip=[5]), group("C", [9, 8], [6], skip=[]))
    assert sampled == {
        name: greedy(worker.model, p, 1) for name, p in {"B": numbers(1, 7), "C": [9, 8]}.items()
    }
    assert spy.calls.count("paged_attention") == 2, "once per layer, for both"


def test_prompts_and_decodes_have_a_kernel_each() -> None:
    worker, spy = make(chunked_prefill=True)
    prompt = numbers(1, 6)
    (token,) = run(worker, group("A", prompt, [5, 2], skip=[]))["A"]
    spy.calls.clear()
    decode = group("A", [*prompt, token], [5, 2], computed=6, skip=[], is_prompt=False)
    sampled = run(worker, group("B", [9, 8], [6], skip=[]), decode)
    assert sampled == {"B": greedy(worker.model, [9, 8], 1), "A": greedy(worker.model, prompt, 2)[1:]}
    assert spy.calls == ["reshape_and_cache", "paged_attention", "paged_attention_decode"] * 2


def test_an_unfinished_chunk_samples_nothing() -> None:
    """Misconception: "whoever is computed gets a token"."""
    worker, _ = make(chunked_prefill=True)
    chunk = group("A", numbers(1, 6), [5, 2], chunk=4, skip=[])
    unfinished = SequenceGroupMetadata(**{**vars(chunk), "do_sample": False})
    sampled = run(worker, unfinished, group("B", [9, 8], [6], skip=[]))
    assert sampled == {"B": greedy(worker.model, [9, 8], 1)}


def test_orders_are_carried_out_in_before_out_before_copies() -> None:
    """Misconception: "the order does not matter". A block that is swapped in may be copied, or swapped out, at once."""
    worker, _ = make()
    gpu, cpu = worker.gpu_caches[0], worker.cpu_caches[0]
    assert cpu is not None
    stamp(cpu, 3, 30.0)
    stamp(gpu, 1, 1.0)
    run(
        worker,
        blocks_to_swap_in=[(3, 0)],
        blocks_to_swap_out=[(1, 3), (0, 2)],
        blocks_to_copy=[(0, 6)],
    )
    assert stamps(gpu, 0, 1, 6) == [30.0, 1.0, 30.0]
    assert stamps(cpu, 3, 2) == [1.0, 30.0]


def test_s11_a_block_is_copied_before_the_token_is_written() -> None:
    """S11. Misconception: "copy when there is time". The copy would overwrite the new token, or lack the old ones."""
    worker, _ = make()
    prompt = numbers(1, 6)
    (token,) = run(worker, group("P", prompt, [0, 1], skip=[]))["P"]
    sampled = run(
        worker,
        group("Q", [*prompt, 30], [0, 2], computed=6, skip=[], is_prompt=False),
        group("P", [*prompt, token], [0, 1], computed=6, skip=[], is_prompt=False),
        blocks_to_copy=[(1, 2)],
    )
    assert sampled == {"Q": greedy(worker.model, [*prompt, 30], 1), "P": greedy(worker.model, prompt, 2)[1:]}


def test_a_swapped_sequence_goes_on_where_it_stood() -> None:
    worker, _ = make()
    prompt = numbers(1, 6)
    (token,) = run(worker, group("A", prompt, [0, 1], skip=[]))["A"]
    run(worker, blocks_to_swap_out=[(0, 2), (1, 0)])
    stamp(worker.gpu_caches[0], 0, torch.nan)
    stamp(worker.gpu_caches[0], 1, torch.nan)
    decode = group("A", [*prompt, token], [7, 4], computed=6, skip=[], is_prompt=False)
    sampled = run(worker, decode, blocks_to_swap_in=[(2, 7), (0, 4)])
    assert sampled == {"A": greedy(worker.model, prompt, 2)[1:]}


def test_orders_without_a_group_are_carried_out() -> None:
    """A step in which everybody was preempted computes nothing, but its swaps count."""
    worker, _ = make()
    stamp(worker.gpu_caches[0], 1, 1.0)
    assert run(worker, blocks_to_swap_out=[(1, 0)]) == {}
    cpu = worker.cpu_caches[0]
    assert cpu is not None and stamps(cpu, 0) == [1.0]


def test_each_virtual_engine_has_its_own_memory() -> None:
    worker, _ = make(virtual_engines=2)
    run(worker, group("A", [9, 8], [6], skip=[]), ve=1)
    assert stamps(worker.gpu_caches[0], 6) == [0.0]
    assert float(worker.gpu_caches[1].layers[0][0][6].abs().sum()) > 0


def test_a_request_that_cannot_be_built_moves_nothing() -> None:
    worker, spy = make()
    stamp(worker.gpu_caches[0], 1, 1.0)
    with pytest.raises(RequestError, match="request 'B'"):
        run(worker, group("A", [9], [6]), group("B", numbers(1, 6), [5]), blocks_to_copy=[(1, 2)])
    assert (stamps(worker.gpu_caches[0], 2), spy.calls) == ([0.0], [])


def test_the_run_mark_tells_what_was_skipped() -> None:
    marks = Marks()
    worker, _ = make(observer=marks)
    run(worker, group("A", numbers(1, 8), [5, 2], skip=[]))
    run(worker, group("B", numbers(1, 8), [5, 2], skip=[5, 2]))
    assert marks.of("run") == [{"start": 0, "num_tokens": 8}, {"start": 7, "num_tokens": 1}]
