"""What the two shipped models are made of: shape, tokenizer, first weights.

`tiny` is a Qwen3 network of full-attention layers. `hybrid` has a layer of each kind: linear attention, a
sliding window, linear attention again, full attention.

The shipped hybrid was trained while its recipe was found, as its log shows where it was resumed: before step 1500 with
2048 tokens a step and without repeats, before step 2000 with the rope base 1000 everywhere, under which it did
not learn to look back. From step 2500 on, two thirds of its steps, the recipe is the one below.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from refengine.model.config import FULL_ATTENTION, LINEAR_ATTENTION, SLIDING_ATTENTION
from refengine.model.corpus import EVENTS, document, with_events, with_glossary, world
from refengine.model.decoder import Attention, Decoder, Layer, rotary_frequencies
from refengine.model.linear_attention import LinearAttention

SEED = 1  # evaluate_tiny draws its worlds from another one
SHARPNESS = 1.5  # initial weight of the norms on queries and keys: attention logits stay below 8 * its square
SLOWEST_DECAY = 8.0  # sigmoid(8): after 300 tokens 90 % of a sum is left


@dataclass(frozen=True)
class Recipe:
    """One model to train."""

    shape: dict[str, Any]  # of config.json, without what the tokenizer says
    look_back: dict[int, int] = field(
        default_factory=dict
    )  # query head of layer 0 -> tokens it looks back at first
    counts: bool = False  # learns to count events as well
    tokens_per_step: int = 2048


COMMON = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
RECIPES = {
    "tiny": Recipe(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "head_dim": 64,
            "rope_theta": 1000.0,
            **COMMON,
        },
        look_back={0: 1, 2: 2},
    ),
    "hybrid": Recipe(
        {
            "model_type": "refengine_hybrid",
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "layer_types": [LINEAR_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION],
            "sliding_window": 32,
            "linear_conv_kernel_dim": 4,
            "rope_theta": 1_000_000.0,  # the full-attention layer looks for words, wherever they stand
            "rope_local_base_freq": 1000.0,
            **COMMON,
        },
        counts=True,
        tokens_per_step=1024,
    ),
}


def train_tokenizer(recipe: Recipe) -> Tokenizer:
    """A byte-level BPE, large enough that every word of the corpus is one token; digits stay single."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(SEED)
    worlds = [with_glossary(rng, world(rng, 6), 2) for _ in range(3000)]
    if recipe.counts:
        worlds = [with_events(rng, drawn, len(EVENTS)) for drawn in worlds]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([document(drawn) for drawn in worlds], trainer)
    return tokenizer


def hf_config(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json` of the model; its end-of-sequence token is the line end."""
    line_end = tokenizer.encode("\n").ids[0]
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": None, "eos_token_id": line_end}
    return {**recipe.shape, **sizes}


def initialise(decoder: Decoder, recipe: Recipe) -> None:
    """Normal weights, scaled so that each layer adds little at first. Mutates: decoder."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.fill_(SHARPNESS)
            elif "embed_tokens" in name:
                parameter.normal_(0, 0.05)
            elif parameter.dim() == 2:
                adds_to_stream = "o_proj" in name or "down_proj" in name
                parameter.normal_(0, parameter.shape[1] ** -0.5 * (0.35 if adds_to_stream else 1.0))
        for module in decoder.modules():
            if isinstance(
                module, LinearAttention
            ):  # some heads forget within a few tokens, some hardly at all
                bias = module.decay_proj.bias
                bias.copy_(torch.linspace(2.0, SLOWEST_DECAY, len(bias)))
        for head, distance in recipe.look_back.items():
            look_back(decoder, head, distance)


def look_back(decoder: Decoder, head: int, distance: int) -> None:
    """Lets a head of layer 0 begin as one that attends `distance` tokens back. Mutates: decoder.

    Feature 0 of every embedding becomes a constant, and the keys and queries of this head read little else.
    The rotary embedding turns a constant key at position j by an angle j * f. A query that was turned back by
    `distance * f` beforehand agrees with it best at j = i - distance. Only the fastest pairs of features are
    used: they tell neighbours apart best. In the tied output the constant adds the same to all logits.
    """
    config = decoder.config
    attention = cast(Attention, cast(Layer, decoder.layers[0]).self_attn)
    frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    half, fast = config.head_dim // 2, 4
    decoder.embed_tokens.weight[:, 0] = 0.15
    rows = attention.qkv_proj.weight.view(-1, config.head_dim, config.hidden_size)
    key_head = config.num_heads + head // (config.num_heads // config.num_kv_heads)
    angles = distance * frequencies[:fast]
    rows[[head, key_head]] *= 0.1
    rows[[head, key_head], :, 0] = 0.0
    rows[key_head, :fast, 0] = 2.0
    rows[head, :fast, 0] = 2.0 * angles.cos()
    rows[head, half : half + fast, 0] = -2.0 * angles.sin()
