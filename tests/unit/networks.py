"""Tiny random networks of `transformers`, saved as checkpoints: what our decoder must agree with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from refengine.attention import AttentionMetadata, PagedAttention
from refengine.kv_cache import KVCache
from refengine.model.decoder import Decoder
from refengine.v1.layer_groups import layer_groups

VOCAB_SIZE, WINDOW = 101, 16
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
LOGIT = 2.0  # the largest, about: differences below are to be read beside it
TOKENS = torch.randint(VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1))  # 5 windows and a half


def make_network(directory: Path, family: str, **options: Any) -> Any:
    """Writes a random network of `transformers` to `directory`. Returns: it, with logits up to LOGIT."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(
        transformers, f"{family}Config"
    )
    network = getattr(transformers, f"{family}ForCausalLM")(
        config_class(**(SIZES | options), attn_implementation="eager")
    ).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1:  # norms and biases start out as if they were not there
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in name:
                parameter.mul_(4.0)  # attention that is nearly uniform hides a wrong mask
        scale = LOGIT / network(TOKENS[None]).logits.abs().max()
        norm = network.model.norm.weight  # the last one, so all logits scale with it
        norm.copy_((norm + 1) * scale - 1 if family == "Gemma3" else norm * scale)
    network.save_pretrained(directory)
    return network


@torch.inference_mode()
def expected_logits(network: Any, tokens: Tensor = TOKENS) -> Tensor:
    """`[num_tokens, vocab_size]`."""
    logits: Tensor = network(tokens[None]).logits[0]
    return logits


@torch.inference_mode()
def paged_logits(decoder: Decoder, tokens: Tensor, chunks: list[int], block_size: int) -> Tensor:
    """One sequence through the paged cache, in steps of these sizes, over scattered blocks. `[num_tokens, vocab_size]`.

    A sliding layer finds its window's blocks only: those before it are replaced by the null block, and all of that
    is NaN, so that nobody can read it unnoticed.
    """
    config, num_blocks = decoder.config, -(-len(tokens) // block_size)
    cache = KVCache(config, num_blocks + 4, block_size)
    for pair in cache.layers:
        for tensor in pair:
            tensor.fill_(torch.nan)
    table = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(2))[:num_blocks] + 1
    done, parts = 0, []
    for size in chunks:
        positions = torch.arange(done, done + size)
        attends: dict[int, PagedAttention] = {}
        for group in layer_groups(config, block_size):
            window = group.spec.window
            gone = 0 if window is None else max(0, done - window + 1) // block_size
            metadata = AttentionMetadata(
                slot_mapping=table[positions // block_size] * block_size + positions % block_size,
                block_tables=torch.cat((torch.zeros_like(table[:gone]), table[gone:]))[None],
                query_start_loc=torch.tensor([0, size]),
                seq_lens=torch.tensor([done + size]),
            )
            attend = PagedAttention(cache, metadata, None, window)
            attends |= dict.fromkeys(group.layers, attend)
        hidden = decoder(
            tokens[done : done + size], positions, lambda layer, *qkv, by=attends: by[layer](layer, *qkv)
        )
        parts.append(decoder.logits(hidden))
        done += size
    return torch.cat(parts)
