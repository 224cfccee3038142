"""Decode steps as graphs. On a CPU a recorded graph is played by doing the work again; all else is the real thing."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import kernels.cuda
from kernels import Backend, backend_for
from refengine import LLM, gpu
from refengine.attention import AttentionMetadata
from refengine.commands.engine_speed import speed_rows
from refengine.config import EngineConfig
from refengine.cuda_graphs import (
    DecodeBuffers,
    GraphedDecode,
    GraphLimits,
    LayerTable,
    captured_sizes,
    graphs_for,
)
from refengine.hashing import Adapter
from refengine.kv_cache import KVCache
from refengine.llm import ENGINE_CLASSES
from refengine.model.config import FULL_ATTENTION, SLIDING_ATTENTION
from refengine.model.decoder import Decoder
from refengine.model.lora import write_example_adapter
from refengine.sampling import SamplingParams
from refengine.v0.engine import LLMEngine
from refengine.v1.engine import EngineCore
from tests.unit.hybrid_models import greedy, make_hybrid
from tests.unit.models import greedy as greedy_without_cache
from tests.unit.models import make_decoder
from tests.unit.test_hybrid_engine import play

CPU = torch.device("cpu")
ATTENTION_ONLY = {
    "full": (FULL_ATTENTION, FULL_ATTENTION),
    "windows": (SLIDING_ATTENTION, SLIDING_ATTENTION),
    "windows and full": (SLIDING_ATTENTION, FULL_ATTENTION),
}
Engine = EngineCore | LLMEngine


class Recorded:
    """Stands in for GraphCapture: a replay does the work again, and its result comes in the memory of the first."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, work: gpu.Work) -> gpu.Work:
        self.num_captured += 1
        result = work()

        def replay() -> Tensor:
            self.num_replayed += 1
            return result.copy_(work())

        return replay


class Refusing(Recorded):
    """A GPU on which nothing can be recorded."""

    def __call__(self, work: gpu.Work) -> gpu.Work:
        self.num_captured += 1
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")


Graphed = Callable[..., None]


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> Graphed:
    """Makes both generations build their graphs although there is no GPU."""

    def install(capture: Recorded, most: GraphLimits | None = None) -> None:
        def build(
            model: Decoder, cache: KVCache, backend: Any, layers: Any, limits: GraphLimits, stream: None
        ) -> GraphedDecode:
            assert stream is None
            return GraphedDecode(model, cache, backend, layers, most or limits, capture)

        monkeypatch.setattr("refengine.v1.model_runner.graphs_for", build)
        monkeypatch.setattr("refengine.v0.worker.graphs_for", build)

    return install


def make(generation: str, decoder: Decoder, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 80,
        "hash_seed": "0",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 6,
    }
    return ENGINE_CLASSES[generation](EngineConfig(engine=generation, **(defaults | options)), decoder)


def step_of(*lengths: int, width: int, block_size: int = 4, first_block: int = 1) -> list[AttentionMetadata]:
    """Sequences of these lengths, one new token each, whose tables hold `first_block` and those after it."""
    tables = torch.arange(first_block, first_block + width).repeat(len(lengths), 1)
    last = torch.tensor(lengths) - 1
    slots = tables.gather(1, last[:, None] // block_size).squeeze(1) * block_size + last % block_size
    return [AttentionMetadata(slots, tables, torch.arange(len(lengths) + 1), torch.tensor(lengths))]


def test_sizes_that_are_recorded() -> None:
    assert captured_sizes(1) == [1]
    assert captured_sizes(3) == [1, 2, 3]
    assert captured_sizes(8) == [1, 2, 4, 8]
    assert captured_sizes(9) == [1, 2, 4, 8, 9]
    assert captured_sizes(32) == [1, 2, 4, 8, 16, 24, 32]


# -- buffers ------------------------------------------------------------------------------------------------


def test_a_step_is_filled_up_with_sequences_of_one_token_that_write_nothing() -> None:
    buffers = DecodeBuffers(GraphLimits(8, 4), 1, CPU)
    for buffer in (buffers.token_ids, buffers.positions, buffers.slots, buffers.seq_lens, buffers.tables):
        buffer.fill_(77)  # what an earlier step left
    buffers.load(torch.tensor([5, 6, 7]), torch.tensor([4, 0, 2]), step_of(5, 1, 3, width=2), 4)
    assert buffers.token_ids.tolist() == [5, 6, 7, 0, 77, 77, 77, 77]
    assert buffers.positions[:4].tolist() == [4, 0, 2, 0]
    assert buffers.slots[0, :4].tolist() == [8, 4, 6, -1]
    assert buffers.seq_lens[:4].tolist() == [5, 1, 3, 1]
    assert buffers.tables[0, :4].tolist() == [[1, 2, 0, 0]] * 3 + [[0, 0, 0, 0]]
    assert buffers.tables[0, 4:].unique().tolist() == [77], "rows that are not replayed stay as they are"


def test_a_narrower_step_clears_the_columns_of_the_one_before() -> None:
    """Case S36. Misconception: "what is not overwritten does no harm". A recorded kernel sees the whole table."""
    buffers = DecodeBuffers(GraphLimits(2, 4), 1, CPU)
    buffers.load(torch.tensor([1]), torch.tensor([15]), step_of(16, width=4, first_block=9), 1)
    assert buffers.tables[0, 0].tolist() == [9, 10, 11, 12]
    buffers.load(torch.tensor([1]), torch.tensor([7]), step_of(8, width=2, first_block=5), 1)
    assert buffers.tables[0, 0].tolist() == [5, 6, 0, 0]


def test_room_ends_with_the_columns_and_with_the_rows() -> None:
    buffers = DecodeBuffers(GraphLimits(2, 4), 1, CPU)
    assert buffers.have_room_for(step_of(16, 16, width=4))
    assert not buffers.have_room_for(step_of(17, width=5))
    assert not buffers.have_room_for(step_of(1, 1, 1, width=1))


# -- steps --------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> Iterator[tuple[GraphedDecode, Recorded]]:
    """Graphs for at most 4 sequences of 4 blocks each."""
    decoder, capture = make_decoder(), Recorded()
    cache = KVCache(decoder.config, 10, 4)
    layers = [LayerTable()] * decoder.config.num_layers
    with torch.inference_mode():
        yield (
            GraphedDecode(decoder, cache, backend_for(CPU, "reference"), layers, GraphLimits(4, 4), capture),
            capture,
        )


def run(graphs: GraphedDecode, *lengths: int, width: int, num_tokens: int | None = None) -> Tensor | None:
    count = len(lengths) if num_tokens is None else num_tokens
    return graphs.run(torch.ones(count).long(), torch.zeros(count).long(), step_of(*lengths, width=width))


def test_a_size_is_recorded_once_and_serves_smaller_steps(steps: tuple[GraphedDecode, Recorded]) -> None:
    graphs, capture = steps
    for lengths in ((3,), (3, 4, 5), (6, 7, 8), (1, 2, 3, 4)):
        hidden = run(graphs, *lengths, width=2)
        assert hidden is not None and len(hidden) == len(lengths)
    assert (capture.num_captured, capture.num_replayed, sorted(graphs.replays)) == (2, 4, [1, 4])


def test_a_table_wider_than_the_recorded_one_is_left_to_the_kernels(
    steps: tuple[GraphedDecode, Recorded],
) -> None:
    """Case S36: four columns are recorded, a sequence has its seventeenth token, and then a short one comes."""
    graphs, capture = steps
    assert run(graphs, 16, width=4) is not None
    assert run(graphs, 17, width=5) is None
    assert graphs.buffers.tables[0, 0].tolist() == [1, 2, 3, 4], "untouched"
    again = run(graphs, 6, width=2)
    assert again is not None and graphs.buffers.tables[0, 0].tolist() == [1, 2, 0, 0]
    assert (capture.num_captured, capture.num_replayed) == (1, 2)


def test_a_step_with_a_longer_query_is_left_to_the_kernels(steps: tuple[GraphedDecode, Recorded]) -> None:
    graphs, capture = steps
    assert run(graphs, 3, 6, width=2, num_tokens=5) is None
    assert capture.num_captured == 0


def test_filled_in_sequences_write_nothing_and_do_not_change_the_others(
    steps: tuple[GraphedDecode, Recorded],
) -> None:
    graphs, _ = steps
    for cache in (tensor for layer in graphs.kv_cache.layers for tensor in layer):
        cache.normal_(generator=torch.Generator().manual_seed(1))
    before = [cache.clone() for layer in graphs.kv_cache.layers for cache in layer]
    alone = run(graphs, 6, 5, 7, width=2)  # one row is filled in
    assert alone is not None
    alone = alone.clone()
    after = [cache for layer in graphs.kv_cache.layers for cache in layer]
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten(2).any(2).nonzero().tolist()
        assert changed == [[2, 0], [2, 1], [2, 2]], "the slots of the three new tokens"
    graphs.kv_cache.layers[0][0][0] = torch.nan  # block 0, which only filled-in sequences read
    spoilt = run(graphs, 6, 5, 7, width=2)
    assert spoilt is not None and torch.equal(spoilt, alone)


# -- engines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("generation", "mixture"), [("v0", "full"), *(("v1", m) for m in ATTENTION_ONLY)])
def test_random_requests_get_the_tokens_that_they_get_without(
    graphed: Graphed, generation: str, mixture: str, backend: str
) -> None:
    decoder, capture = make_hybrid(layer_types=ATTENTION_ONLY[mixture]), Recorded()
    graphed(capture)
    for seed in range(3):
        engine = make(generation, decoder, backend=backend)
        for prompt, output in play(engine, random.Random(seed)).values():  # type: ignore[arg-type]
            assert output == greedy(decoder, prompt, len(output))
    assert capture.num_replayed > 30, "a workload that proves something"
    assert capture.num_captured <= 3 * len(captured_sizes(6))


def test_the_cuda_kernels_take_the_filled_in_rows(graphed: Graphed) -> None:
    """The kernels themselves, in the interpreter."""
    decoder, capture = make_decoder(), Recorded()
    graphed(capture)
    engine = make("v1", decoder, backend="interpreter")
    prompts = {"A": [1, 2, 3], "B": [4, 5, 6, 7, 8], "C": [9]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=3))
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests:
        for step in engine.step():
            tokens.setdefault(step.request_id, []).extend(step.token_ids)
    assert tokens == {name: greedy_without_cache(decoder, prompt, 3) for name, prompt in prompts.items()}
    assert (capture.num_captured, capture.num_replayed) == (1, 2), "three sequences in a graph for four"


@pytest.mark.parametrize("generation", ["v0", "v1"])
def test_long_sequences_leave_the_graphs_and_short_ones_return(graphed: Graphed, generation: str) -> None:
    decoder, capture = make_hybrid(layer_types=ATTENTION_ONLY["full"]), Recorded()
    graphed(capture, GraphLimits(2, 4))  # tables of up to 16 tokens
    engine = make(generation, decoder, enable_prefix_caching=False)
    for name, count, replayed in (("long", 16, 0), ("short", 5, 3), ("crossing", 14, 5)):
        prompt = list(range(1, count + 1))
        engine.add_request(name, prompt, SamplingParams(max_tokens=4))
        tokens: list[int] = []
        while engine.has_unfinished_requests:
            tokens += [token for step in engine.step() for token in step.token_ids]
        assert tokens == greedy(decoder, prompt, 4)
        assert capture.num_replayed == replayed, name


def test_a_prompt_of_one_token_is_no_decode_in_v0(graphed: Graphed) -> None:
    """It reads no pages and brings no table, so in a graph it would read block 0 as if it were its own."""
    decoder, capture = make_decoder(), Recorded()
    graphed(capture)
    engine = make("v0", decoder, enable_chunked_prefill=False, max_num_batched_tokens=128)
    engine.add_request("A", [9], SamplingParams(max_tokens=3))
    tokens = [token for _ in range(3) for step in engine.step() for token in step.token_ids]
    assert tokens == greedy_without_cache(decoder, [9], 3) and capture.num_replayed == 2


@pytest.mark.parametrize("generation", ["v0", "v1"])
def test_a_failed_recording_is_one_sentence_and_the_engine_goes_on(graphed: Graphed, generation: str) -> None:
    decoder, capture = make_hybrid(layer_types=ATTENTION_ONLY["full"]), Refusing()
    graphed(capture)
    engine = make(generation, decoder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for prompt, output in play(engine, random.Random(1)).values():  # type: ignore[arg-type]
            assert output == greedy(decoder, prompt, len(output))
    (warning,) = said
    assert str(warning.message).endswith(
        "so all steps run without graphs from here on (RuntimeError: CUDA error: operation not permitted when "
        "stream is capturing)"
    )
    assert capture.num_captured == 1


@pytest.mark.parametrize("can_record", [True, False])
def test_the_device_check_tells_what_was_recorded(graphed: Graphed, can_record: bool) -> None:
    graphed(Recorded() if can_record else Refusing())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = list(speed_rows("cpu", batches=(1, 3), new_tokens=3))
    if can_record:
        assert [row["graphs"] for row in rows] == [[1], [1, 3]] * 2 and not any(
            "error" in row for row in rows
        )
    else:
        assert [row.get("graphs") for row in rows] == [[], None] * 2
        assert all("could not be recorded" in row["error"] for row in rows[1::2])


@pytest.mark.parametrize("generation", ["v0", "v1"])
def test_adapters_run_without_graphs(graphed: Graphed, generation: str, tmp_path: Path) -> None:
    decoder, capture = make_decoder(), Recorded()
    adapter = Adapter("a", write_example_adapter(tmp_path, decoder.config, 1))
    plain = make(generation, decoder)
    graphed(capture)
    tokens: list[list[int]] = []
    for engine in (plain, make(generation, decoder)):
        engine.add_request("A", [1, 2, 3], SamplingParams(max_tokens=4), adapter=adapter)
        tokens.append([])
        while engine.has_unfinished_requests:
            tokens[-1] += [token for step in engine.step() for token in step.token_ids]
    assert tokens[0] == tokens[1] and capture.num_captured == 0


def test_prompt_scores_are_the_same(graphed: Graphed) -> None:
    """A chunk of one token is a step like any other, and its prompt is scored from the same rows."""
    decoder, capture, scores = make_decoder(), Recorded(), []
    for install in (lambda: None, lambda: graphed(capture)):
        install()
        engine = make("v1", decoder, max_num_batched_tokens=1)
        engine.add_request("A", [1, 2, 3, 4, 5], SamplingParams(max_tokens=2, prompt_logprobs=1))
        steps = [step for _ in range(6) for step in engine.step()]
        scores.append([step.prompt_logprobs for step in steps])
    assert capture.num_replayed == 6
    for without, recorded in zip(*scores, strict=True):
        if without is None:
            assert recorded is None
            continue
        assert without[0] == recorded[0]
        for plain, graph in zip(without[1], recorded[1], strict=True):
            assert plain.keys() == graph.keys()
            assert all(abs(plain[t].logprob - graph[t].logprob) < 1e-5 for t in plain)


def test_states_have_no_graphs(graphed: Graphed) -> None:
    graphed(Recorded())
    engine = make("v1", make_hybrid())
    assert engine.graphs is None


def test_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """None on a CPU, none if the options say so, and none with kernels that may not be recordable."""
    decoder, limits = make_decoder(), GraphLimits(2, 2)
    model = decoder, KVCache(decoder.config, 4, 4)
    layers, stream = [LayerTable()] * 2, cast(torch.cuda.Stream, object())
    cuda, reference = cast(Backend, kernels.cuda), backend_for(CPU, "reference")
    monkeypatch.setattr("refengine.cuda_graphs.GraphCapture", lambda stream: Recorded())
    assert graphs_for(*model, cuda, layers, limits, stream) is not None
    assert graphs_for(*model, cuda, layers, limits, None) is None
    assert graphs_for(*model, cuda, layers, None, stream) is None
    assert graphs_for(*model, reference, layers, limits, stream) is None
    assert graphs_for(*model, Backend, layers, limits, stream) is None  # type: ignore[arg-type]
    assert make("v0", decoder).graphs is None and make("v1", decoder).graphs is None


def test_limits_are_what_can_be_scheduled() -> None:
    config = EngineConfig(max_num_seqs=7, block_size=16)
    assert GraphLimits.of(config, 100) == GraphLimits(7, 7)
    assert GraphLimits.of(config, 96) == GraphLimits(7, 6)


# -- the calls of torch -------------------------------------------------------------------------------------


def test_a_capture_runs_the_work_before_it_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class FakeGraph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def fake_capture(graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        log.append(("begin", type(graph).__name__, pool, stream, capture_error_mode))
        yield
        log.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    results: list[Tensor] = []

    def work() -> Tensor:
        log.append("work")
        results.append(torch.zeros(1))
        return results[-1]

    replay = gpu.GraphCapture("stream")(work)  # type: ignore[arg-type]
    assert log == ["work", ("begin", "FakeGraph", "pool", "stream", "thread_local"), "work", "end"]
    assert replay() is replay() is results[1]
    assert log[4:] == ["replay", "replay"]


def test_a_stream_waits_for_what_was_before_and_holds_up_what_comes_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Stream(SimpleNamespace):
        def wait_stream(self, other: Any) -> None:
            log.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def entered(stream: Any) -> Iterator[None]:
        log.append(f"in {stream.name}")
        yield
        log.append("out")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name="default"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    with gpu.on_stream(Stream(name="ours", device="cuda:0")):  # type: ignore[arg-type]
        log.append("work")
    assert log == ["ours waits for default", "in ours", "work", "out", "default waits for ours"]
    with gpu.on_stream(None):
        log.append("nothing")
    assert log[5:] == ["nothing"]


def test_a_tensor_for_the_cpu_is_not_copied() -> None:
    x = torch.ones(2)
    assert gpu.to_device(x, CPU) is x and gpu.new_stream(CPU) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("generation", ["v0", "v1"])
def test_the_engine_on_a_gpu_says_what_it_says_on_a_cpu(generation: str) -> None:
    prompts = [f"Q: What is in block {i}?\nA:" for i in range(5)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = [o.token_ids for o in LLM(engine=generation).generate(prompts, params)]
    for cuda_graphs in (False, True):
        llm = LLM(engine=generation, device="cuda", cuda_graphs=cuda_graphs)
        assert [o.token_ids for o in llm.generate(prompts, params)] == expected
        graphs = llm.engine.graphs
        assert (graphs is not None) == cuda_graphs
        if graphs is not None:
            assert graphs.replays and not graphs.has_failed
