"""The right answer without an engine: the whole sequence through the network, once for every token.

No cache, no blocks, no batch. Everything is computed in float64, because an engine adds up the same numbers in
another order for every way of batching and chunking them: in float32 the last bits of two logits differ by
about 1e-6, and where the two best are that close, a right engine prints the other token. In float64 they differ
by about 1e-15, and such a tie does not happen.
"""

from __future__ import annotations

import tempfile
from functools import cache, lru_cache
from pathlib import Path

import torch

from refengine.attention import causal_attention
from refengine.model.config import ModelConfig
from refengine.model.decoder import Decoder
from refengine.model.lora import write_example_adapter
from refengine.sampling import token_logprobs
from tests.fuzz.scenarios import EOS, MAX_MODEL_LEN, Add
from tests.unit.models import merge_adapter

SPREAD, SEED = 0.7, 3  # of the weights; found by trying: answers vary and depend on far tokens
Tokens = tuple[int, ...]
HOME = tempfile.TemporaryDirectory()  # of the adapters


@cache
def model() -> Decoder:
    """Two layers, since the first layer's K and V depend on their own token only, and not on what came before."""
    torch.set_num_threads(1)
    config = ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_model_len=MAX_MODEL_LEN,
    )
    decoder, generator = Decoder(config), torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 1.0 if "embed" in name else SPREAD, generator=generator)
    return decoder.double().eval()


@cache
def adapter_path(name: str) -> str:
    """The directory of an adapter, which is written there on the first call."""
    return write_example_adapter(Path(HOME.name) / name, model().config, seed=len(name))


@cache
def adapted(name: str | None) -> Decoder:
    """The network with an adapter merged into its weights."""
    return model() if name is None else merge_adapter(model(), adapter_path(name))


@lru_cache(maxsize=10_000)
def answer(prompt: Tokens, add: Add, max_model_len: int = MAX_MODEL_LEN) -> tuple[Tokens, str]:
    """What `add` says to this prompt, and why it stops: "stop" or "length"."""
    said: Tokens = ()
    while True:
        said += (int(_logits(prompt + said, add.adapter)[-1].argmax()),)
        if (said[-1] == EOS and not add.ignore_eos) or said[-1] in add.stop_token_ids:
            return said, "stop"
        if len(said) == add.max_tokens or len(prompt) + len(said) == max_model_len:
            return said, "length"


def prompt_scores(prompt: Tokens, adapter: str | None = None) -> dict[int, float]:
    """The log-probability of each token of the prompt, by position. The first has none."""
    following = torch.tensor(prompt[1:], dtype=torch.int64)
    scores = token_logprobs(_logits(prompt, adapter)[:-1], following, 0) if len(prompt) > 1 else []
    return {i: score[prompt[i]].logprob for i, score in enumerate(scores, start=1)}


def prompts(requests: dict[str, Add]) -> dict[str, Tokens]:
    """The whole prompt of each request: what one follows on is what its forerunner says when left alone."""
    whole: dict[str, Tokens] = {}
    for request_id, add in requests.items():
        whole[request_id] = add.prompt
        if add.follows is not None:
            forerunner = f"r{add.follows}"
            said, _ = answer(whole[forerunner], requests[forerunner])
            whole[request_id] = whole[forerunner] + said + add.prompt
    return whole


@torch.inference_mode()
def _logits(token_ids: Tokens, adapter: str | None) -> torch.Tensor:
    """`[num_tokens, vocab_size]` float64."""
    network = adapted(adapter)
    hidden = network(torch.tensor(token_ids), torch.arange(len(token_ids)), causal_attention)
    return network.logits(hidden)
