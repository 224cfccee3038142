"""The scene for chapter and exercise 12: layers that see only a window or a chunk, on the engine's cache manager.

`WindowStage` is the stage of exercise 04 for such layers: the same calls, one or more groups, and what was asked for
when. `window_model` is a random network whose layers have windows, and `serve` runs one through the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from exercises.tasks.ex03_scene import MAX_MODEL_LEN
from exercises.tasks.ex04_scene import Stage
from refengine.config import EngineConfig
from refengine.hashing import BlockHasher
from refengine.model.config import SLIDING_ATTENTION, ModelConfig
from refengine.model.decoder import Decoder
from refengine.parts import load_parts
from refengine.sampling import SamplingParams
from refengine.trace.codemap import topic
from refengine.trace.record import Record, Recorder
from refengine.v0.allocator import NoFreeBlocksError
from refengine.v0.block_manager import AllocStatus, BlockManager
from refengine.v0.sequence import Sequence as V0Sequence
from refengine.v0.sequence import SequenceGroup
from refengine.v1.coordinator import MANAGERS
from refengine.v1.engine import EngineCore
from refengine.v1.groups.base import GroupManager
from refengine.v1.groups.sliding_window import SlidingWindowManager
from refengine.v1.groups.spec import CHUNKED_LOCAL, FULL_ATTENTION, SLIDING_WINDOW, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request


class WindowStage(Stage):
    """One group, with a `window` or a `chunk` of so many tokens; neither: full attention.

    `group` is the class that manages a window, and runs without guard. `num_blocks` counts the null block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 2,
        *,
        window: int | None = None,
        chunk: int | None = None,
        retention: int | None = None,
        group: type[SlidingWindowManager] = SlidingWindowManager,
        manager: type[KVCacheManager] = KVCacheManager,
        enable_events: bool = False,
        snapshots: bool = True,
    ) -> None:
        """`retention`: the retention interval in tokens, None: every block is published.

        `snapshots`: keep a picture after every mark. A run of thousands of steps does better without.
        """
        kind = SLIDING_WINDOW if window else CHUNKED_LOCAL if chunk else FULL_ATTENTION
        self.recorder = Recorder(snapshots=snapshots)
        self.manager = manager(
            [GroupSpec(0, kind, block_size, window, chunk)],
            num_blocks,
            MAX_MODEL_LEN,
            retention_interval=retention,
            enable_events=enable_events,
            observer=self.recorder,
            managers={**MANAGERS, SLIDING_WINDOW: group},
        )
        self.hasher = BlockHasher("sha256_cbor", block_size, seed="0")
        self.requests: dict[str, Request] = {}
        self.recorder.attach("v1", num_blocks, block_size, self.manager.snapshot)

    @property
    def group(self) -> GroupManager:
        """The manager of the one group."""
        return self.manager.coordinator.groups[0]

    def found(self, token_ids: Iterable[int]) -> int:
        """How many tokens of these a request would find now. Changes nothing."""
        return len(self.lookup(token_ids)) * self.group.block_size

    def grow(self, name: str, num_tokens: int) -> list[int] | None:
        """One step of a running request for so many further tokens of its own. Returns: its table; None: not now."""
        request = self.requests[name]
        self.append(name, *range(1000 + request.num_tokens, 1000 + request.num_tokens + num_tokens))
        return self.schedule(name)

    def decode(self, name: str, num_tokens: int) -> list[int]:
        """So many steps of one token each. Returns: its table."""
        for _ in range(num_tokens):
            self.grow(name, 1)
        return self.table(name)


def num_held(table: Iterable[int]) -> int:
    """Blocks of the pool that stand in a table: the null block is nobody's."""
    return sum(block_id != 0 for block_id in table)


def v0_admission(num_tokens: int, window: int, *, num_free: int, faithful: bool) -> tuple[str, str]:
    """V0's answer to a prompt, blocks of four tokens, and what came of it. `faithful`: with vLLM 0.7.3's defects."""
    manager = BlockManager(4, num_free + 1, 0, watermark=0.0, sliding_window=window, faithful=faithful)
    running = SequenceGroup("rae", [V0Sequence(0, [99])])
    manager.allocate(running)
    group = SequenceGroup("ada", [V0Sequence(1, list(range(num_tokens)))])
    status = manager.can_allocate(group)
    if status is not AllocStatus.OK:
        return status.name, "waits"
    try:
        manager.allocate(group)
    except NoFreeBlocksError as error:
        return status.name, f"{type(error).__name__}: {error}"
    return status.name, "has its blocks"


# -- a network with windows ---------------------------------------------------------------------------------


def window_model(num_layers: int = 2, window: int = 8, seed: int = 0) -> Decoder:
    """A random network, all of whose layers see the last `window` tokens, or with window 0 everything.

    Its weights are large, so that every token within reach matters.
    """
    config = ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_model_len=512,
        layer_types=(SLIDING_ATTENTION,) * num_layers if window else (),
        sliding_window=window or None,
    )
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.6, generator=generator)
    return decoder.eval().requires_grad_(False)


def serve(
    core: EngineCore, prompts: Sequence[Sequence[int]], max_tokens: int, first: int = 0
) -> list[list[int]]:
    """Runs the prompts to their ends, as requests `r0`, `r1`, ... from `first` on. Returns: the tokens of each."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    tokens: dict[str, list[int]] = {f"r{first + i}": [] for i in range(len(prompts))}
    for request_id, prompt in zip(tokens, prompts, strict=True):
        core.add_request(request_id, prompt, params)
    while core.has_unfinished_requests:
        for output in core.step():
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())


def make_engine(
    decoder: Decoder, num_blocks: int = 40, *, parts: Any = None, **options: Any
) -> tuple[EngineCore, Record]:
    """An engine with blocks of four tokens for a network, and the record that it writes. `parts` as in `LLM`."""
    recorder = Recorder(snapshots=True)
    config = EngineConfig(block_size=4, num_blocks=num_blocks, **options)
    return EngineCore(config, decoder, observer=recorder, parts=load_parts(parts)), recorder.record


# -- one layer, by hand ---------------------------------------------------------------------------------------


def paged(keys: Tensor, values: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """One sequence's keys and values in blocks 1, 2, ...; block 0 is left over, as the null block.

    keys, values `[num_tokens, num_kv_heads, head_dim]`. Returns: key cache and value cache.
    """
    num_blocks = -(-len(keys) // block_size)
    caches = torch.zeros(2, num_blocks + 1, block_size, *keys.shape[1:])
    caches[:, 1:].flatten(1, 2)[:, : len(keys)] = torch.stack((keys, values))
    return caches[0], caches[1]


# -- the table of the mapping task ---------------------------------------------------------------------------

TOPICS = ("sliding_window", "null_block", "chunked_local", "retention")


def places() -> list[tuple[str, str, str]]:
    """Generation, symbol, file: where windows are dealt with in vLLM, and places that sound as if they did."""
    rows = [
        (generation, place.symbol, place.where)
        for generation, side in (("V1", "v1"), ("V0", "v0"))
        for name in TOPICS
        for place in getattr(topic(name), side).vllm
    ]
    return list(dict.fromkeys(rows))
