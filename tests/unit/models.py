"""Random tiny models for tests of the engine: what they say is noise, but each token depends on all before it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

from refengine import LLM
from refengine.attention import causal_attention
from refengine.config import EngineConfig
from refengine.model.config import ModelConfig
from refengine.model.decoder import Decoder
from refengine.outputs import StepOutput
from refengine.sampling import SamplingParams
from refengine.v1.engine import EngineCore
from tests.unit import helpers

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,?!"
PIECES = ("th", "er", "on", "an", "he")  # tokens of two characters
VOCAB_SIZE = len(CHARACTERS) + len(PIECES)
MAX_MODEL_LEN = 128
STEP_LIMIT = 1000


def make_decoder(seed: int = 0, max_model_len: int = MAX_MODEL_LEN) -> Decoder:
    """A Qwen3-shaped network with 2 layers and weights that are large enough to make every token matter."""
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_model_len=max_model_len,
        family="qwen3",
        qk_norm=True,
    )
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.6, generator=generator)
    return decoder.eval().requires_grad_(False)


def make_engine(
    decoder: Decoder | None = None, *, eos: Sequence[int] = (), observer: Any = None, **options: Any
) -> EngineCore:
    """An engine with 4-token blocks that checks its integrity after every step."""
    defaults = {
        "block_size": 4,
        "num_blocks": 65,
        "check_integrity": helpers.CHECK_INTEGRITY,
        "hash_seed": "0",
    }
    all_options: dict[str, Any] = defaults | options
    return EngineCore(EngineConfig(**all_options), decoder or make_decoder(), eos, observer)


def run(engine: EngineCore, limit: int = 500) -> dict[str, list[int]]:
    """Steps until nothing is left. Returns: the tokens of each request that got some."""
    tokens: dict[str, list[int]] = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests:
            return tokens
        for step in engine.step():
            tokens.setdefault(step.request_id, []).extend(step.token_ids)
    raise AssertionError(f"the engine did not come to an end within {limit} steps")


def serve(
    engine: EngineCore, prompts: Mapping[str, Sequence[int]], max_tokens: int = 6, **params: Any
) -> dict[str, list[int]]:
    """All prompts in one batch, to their end."""
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=max_tokens, **params))
    return run(engine)


@torch.inference_mode()
def greedy(decoder: Decoder, prompt: Sequence[int], max_tokens: int = 6) -> list[int]:
    """What the network says without any engine: the whole sequence anew for every token, no cache."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), causal_attention)
        tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def merge_adapter(decoder: Decoder, path: str) -> Decoder:
    """A copy of the network with an adapter in its weights, `W + scale * B A`, straight from the adapter's files."""
    options = json.loads((Path(path) / "adapter_config.json").read_text())
    scale = options["lora_alpha"] / (options["r"] ** 0.5 if options.get("use_rslora") else options["r"])
    tensors = load_file(Path(path) / "adapter_model.safetensors")
    merged, config = copy.deepcopy(decoder), decoder.config
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    first_row = {"q_proj": 0, "k_proj": query, "v_proj": query + kv, "o_proj": 0}
    for name in tensors:
        if ".lora_A." in name:
            _, _, _, _, layer, _, target, *_ = name.split(".")
            attention: Any = merged.layers[int(layer)].self_attn
            weight = attention.o_proj.weight if target == "o_proj" else attention.qkv_proj.weight
            a, b = tensors[name].to(weight.dtype), tensors[name.replace("lora_A", "lora_B")].to(weight.dtype)
            weight.data[first_row[target] : first_row[target] + len(b)] += scale * b @ a
    return merged


def limit_steps(llm: LLM) -> LLM:
    """`llm`, but it refuses to step for ever: a request that is lost must fail its test and not hang it."""
    step, left = llm.engine.step, iter(range(STEP_LIMIT))

    def limited() -> list[StepOutput]:
        assert next(left, None) is not None, f"the engine did not come to an end within {STEP_LIMIT} steps"
        return step()

    llm.engine.step = limited  # type: ignore[method-assign]
    return llm


def idle(llm: LLM) -> bool:
    """Nothing is left of any request."""
    llm.engine.scheduler.check_integrity()
    return (
        not llm.engine.has_unfinished_requests
        and not llm._processors
        and llm.engine.kv_cache_manager.usage == 0
    )


def save_model(directory: Path, *, with_tokenizer: bool = True, eos: Sequence[int] = ()) -> Path:
    """Writes `make_decoder()` as a Hugging Face checkpoint. Returns: the directory."""
    decoder = make_decoder()
    config = decoder.config
    directory.mkdir(parents=True, exist_ok=True)
    raw = {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "eos_token_id": list(eos),
    }
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(_checkpoint(decoder), directory / "model.safetensors")
    if with_tokenizer:
        make_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def make_tokenizer() -> Tokenizer:
    """One token per character, and a few of two characters, so that text and tokens have different borders."""
    vocab = {piece: i for i, piece in enumerate((*CHARACTERS, *PIECES))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(piece[0], piece[1]) for piece in PIECES]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _checkpoint(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Our fused projections taken apart again, under the checkpoint's names."""
    config = decoder.config
    rows = {
        "qkv_proj": dict(zip(("q_proj", "k_proj", "v_proj"), (4, 2, 2), strict=True)),
        "gate_up_proj": {"gate_proj": 1, "up_proj": 1},
    }
    unit = {"qkv_proj": config.head_dim, "gate_up_proj": config.intermediate_size}
    tensors = {}
    for name, tensor in decoder.state_dict().items():
        prefix, module = "" if name.startswith("lm_head") else "model.", name.split(".")[-2]
        if module not in rows:
            tensors[prefix + name] = tensor.clone()
            continue
        parts = tensor.split([n * unit[module] for n in rows[module].values()])
        for part, values in zip(rows[module], parts, strict=True):
            tensors[prefix + name.replace(module, part)] = values.clone()
    return tensors
