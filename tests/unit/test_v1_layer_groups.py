"""From kinds of layers to cache groups, with block tables and memory of their own."""

from __future__ import annotations

import torch

from refengine.kv_cache import KVCache, block_bytes, blocks_that_fit
from refengine.model.config import FULL_ATTENTION, SLIDING_ATTENTION
from refengine.sampling import SamplingParams
from refengine.v1.groups import spec
from refengine.v1.groups.spec import GroupSpec
from refengine.v1.input_batch import InputBatch
from refengine.v1.layer_groups import LayerGroup, layer_groups
from refengine.v1.scheduler_output import ScheduledRequest
from tests.unit.hybrid_models import WINDOW, make_hybrid
from tests.unit.models import make_decoder


def test_layers_of_one_kind_share_a_group() -> None:
    """Misconception: "each layer has its blocks". Layers that need the same tokens share one table."""
    full = LayerGroup(GroupSpec(0, spec.FULL_ATTENTION, 4), (3,))
    sliding = LayerGroup(GroupSpec(1, spec.SLIDING_WINDOW, 4, WINDOW), (1,))
    states = LayerGroup(GroupSpec(2, spec.MAMBA, 4), (0, 2))
    assert layer_groups(make_hybrid().config, 4) == [full, sliding, states]


def test_a_model_of_one_kind_has_one_group() -> None:
    assert layer_groups(make_decoder().config, 16) == [
        LayerGroup(GroupSpec(0, spec.FULL_ATTENTION, 16), (0, 1))
    ]
    only_windows = layer_groups(make_hybrid(layer_types=[SLIDING_ATTENTION] * 2).config, 16)
    assert only_windows == [LayerGroup(GroupSpec(0, spec.SLIDING_WINDOW, 16, WINDOW), (0, 1))]
    mixed = make_hybrid(layer_types=[SLIDING_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION]).config
    assert [group.layers for group in layer_groups(mixed, 16)] == [(1,), (0, 2)]


def test_a_block_counts_its_states_and_its_slots() -> None:
    """Misconception: "a block is so many tokens in every layer". A state does not grow with the block, and it stays
    float32 beside keys and values of half the size."""
    config = make_hybrid().config
    state = 4 * (4 * 8 * 8 + 3 * 3 * 4 * 8)  # bytes: matrices of all heads, and the tail
    assert block_bytes(config, 5, torch.bfloat16) == 2 * state + 2 * (2 * 5 * 2 * 8 * 2)
    cache = KVCache(config, 7, 5, torch.bfloat16)
    tensors = [tensor for pair in cache.layers for tensor in pair]
    assert cache.num_bytes == sum(tensor.nbytes for tensor in tensors)
    assert [tensor.shape[1:] for tensor in tensors[:4]] == [(4, 8, 8), (3, 96), (5, 2, 8), (5, 2, 8)]
    assert [tensor.dtype for tensor in tensors[1:3]] == [torch.float32, torch.bfloat16]
    assert all(len(tensor) == 7 and not tensor.any() for tensor in tensors)
    assert blocks_that_fit(cache.num_bytes, config, 5, torch.bfloat16) == 7


def test_a_request_has_a_table_in_every_group() -> None:
    """Misconception: "groups keep step". Their tables grow apart, and a moved row takes all of them along."""
    batch = InputBatch(max_num_seqs=3, max_model_len=12, block_size=4, num_groups=2)
    for name in ("A", "B"):
        batch.add(ScheduledRequest(name, "new", 1, 0, None, (1,), 1, SamplingParams()))
    batch.add_blocks("B", [1, 2], [3])
    batch.add_blocks("B", [], [0, 5])
    batch.remove("A")
    assert batch.block_tables[0].tolist() == [[1, 2, 0], [3, 0, 5]]
    assert batch.block_counts[0].tolist() == [2, 3]
    assert (batch.block_table[0].tolist(), int(batch.num_blocks[0])) == ([1, 2, 0], 2), "the first group's"
    batch.remove("B")
    batch.add(ScheduledRequest("C", "new", 1, 0, None, (1,), 1, SamplingParams()))
    assert batch.block_counts[0].tolist() == [0, 0]
