"""How the shipped tiny model was made, and how to make it again: one file, one thread, less than an hour.

    python -m refengine.model.train_tiny --out DIR --minutes 48
    python -m refengine.model.train_tiny --out DIR --minutes 48 --resume DIR    # after an interruption

The model must learn one thing: to find in its context the fact that a question is about, and to repeat it.
That takes two heads in a row (an induction circuit): one tells each token what stood before it, the other
searches for the place where the same words stood before. Small networks find it late. What helps:

* the answer repeats the words of the fact, so the same n-gram leads to the value in both places;
* two heads of layer 0 begin as what they would have to become: heads that look one and two tokens back;
* many questions about a world are asked in one row, and answers count twenty times as much as the rest;
* worlds are small at first and grow.

Writes a Hugging Face Qwen3 directory, training_log.txt, and checkpoint.pt to resume from.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from refengine.model.config import ModelConfig
from refengine.model.corpus import World, document, pieces, with_glossary, world
from refengine.model.decoder import Attend, Decoder, Layer
from refengine.model.loader import FUSED

SEED = 1  # evaluate_tiny draws its worlds from another one
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LOOK_BACK = {0: 1, 2: 2}  # query head of layer 0 -> how many tokens back it looks at first
SHARPNESS = 1.5  # initial weight of the norms on queries and keys: attention logits stay below 8 * its square
LEARNING_RATE, WARMUP_STEPS = 3e-3, 50
TOKENS_PER_STEP = 2048
PROMPT_WEIGHT = 0.05  # in the loss, of every token that is not part of an answer; those count 1
GROWTH = ((0.0, 3), (0.15, 6), (0.3, 10), (0.45, 14))  # (from this share of the time, at most so many facts)
MAX_QUESTIONS = 8  # in a row; with 14 facts that makes about 350 tokens
STEPS_PER_CHECKPOINT = 500


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE, large enough that every word of the corpus is one token; digits stay single."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(SEED)
    texts = [document(with_glossary(rng, world(rng, 6), 2)) for _ in range(3000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def hf_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json` of the model; its end-of-sequence token is the line end."""
    line_end = tokenizer.encode("\n").ids[0]
    return {**SHAPE, "vocab_size": tokenizer.get_vocab_size(), "bos_token_id": None, "eos_token_id": line_end}


def initialise(decoder: Decoder) -> None:
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
        look_back(decoder)


def look_back(decoder: Decoder) -> None:
    """Lets some heads of layer 0 begin as heads that attend a fixed distance back. Mutates: decoder.

    Feature 0 of every embedding becomes a constant, and the keys and queries of these heads read little else.
    The rotary embedding turns a constant key at position j by an angle j * f. A query that was turned back by
    `distance * f` beforehand agrees with it best at j = i - distance. Only the fastest pairs of features are
    used: they tell neighbours apart best. In the tied output the constant adds the same to all logits.
    """
    config = decoder.config
    attention = cast(Layer, decoder.layers[0]).self_attn
    half, fast = config.head_dim // 2, 4
    decoder.embed_tokens.weight[:, 0] = 0.15
    rows = attention.qkv_proj.weight.view(-1, config.head_dim, config.hidden_size)
    for head, distance in LOOK_BACK.items():
        key_head = config.num_heads + head // (config.num_heads // config.num_kv_heads)
        angles = distance * decoder.rotary.inv_freq[:fast]
        rows[[head, key_head]] *= 0.1
        rows[[head, key_head], :, 0] = 0.0
        rows[key_head, :fast, 0] = 2.0
        rows[head, :fast, 0] = 2.0 * angles.cos()
        rows[head, half : half + fast, 0] = -2.0 * angles.sin()


class Reader:
    """Draws documents and makes batches of them. Encoded sentences are kept: there are only so many."""

    def __init__(self, tokenizer: Tokenizer, seed: str) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.known: dict[str, list[int]] = {}

    def batch(self, max_facts: int) -> tuple[Tensor, Tensor]:
        """As many documents about equally many facts as fit into TOKENS_PER_STEP, padded at the end.

        Returns: token ids `[rows, width]` int64, and the loss weight of predicting each, float32.
        Mutates: rng, known.
        """
        num_facts = self.rng.randint(1, max_facts)
        rows = [self.row(num_facts)]
        while max(len(ids) for ids, _ in rows) * len(rows) <= TOKENS_PER_STEP:
            rows.append(self.row(num_facts))
        rows = rows[:-1] or rows
        tokens = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
        weights = pad_sequence([torch.tensor(importance) for _, importance in rows], batch_first=True)
        return tokens, weights

    def row(self, num_facts: int) -> tuple[list[int], list[float]]:
        """Token ids and loss weights of one document."""
        drawn = world(self.rng, num_facts)
        if self.rng.random() < 0.1:
            drawn = with_glossary(self.rng, World((), ()), 4)
        elif self.rng.random() < 0.5:
            drawn = with_glossary(self.rng, drawn, self.rng.randint(1, 2))
        ids: list[int] = []
        weights: list[float] = []
        for i, piece in enumerate(pieces(World(drawn.sentences, drawn.questions[:MAX_QUESTIONS]))):
            encoded = self.encode(piece)
            ids += encoded
            weights += [1.0 if i % 2 else PROMPT_WEIGHT] * len(encoded)
        return ids, weights

    def encode(self, text: str) -> list[int]:
        """Token ids, sentence by sentence. Mutates: known."""
        ids: list[int] = []
        for sentence in text.replace(". ", ".\0 ").replace("\n", "\0\n").split("\0"):
            if sentence not in self.known:
                self.known[sentence] = self.tokenizer.encode(sentence).ids
            ids += self.known[sentence]
        return ids


def attend_rows(num_rows: int) -> Attend:
    """Plain causal attention within each row of the flat `[rows * width, heads, head_dim]`; no cache."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.view(num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(query.shape)

    return attend


def answer_loss(decoder: Decoder, tokens: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """The weighted loss to minimise, and the mean loss of the answer tokens alone, in nats per token."""
    rows, width = tokens[:, 1:].shape
    with torch.autocast("cpu", torch.bfloat16):
        hidden = decoder(tokens[:, :-1].flatten(), torch.arange(width).repeat(rows), attend_rows(rows))
        logits = decoder.logits(hidden)
    losses = F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), reduction="none")
    importance = weights[:, 1:].flatten()
    loss = (losses * importance).sum() / importance.sum()
    return loss, losses.detach()[importance == 1.0].mean().item()


def learning_rate(step: int, share: float) -> float:
    """Linear warm-up, then half a cosine down to 3 %. `share`: of the time that is over."""
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (0.03 + 0.97 * cosine)


class Trainer:
    """A model in training, and everything needed to stop and go on."""

    def __init__(self, out: Path, minutes: float) -> None:
        self.out, self.minutes = out, minutes
        out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = train_tokenizer()
        self.decoder = Decoder(ModelConfig.from_hf(hf_config(self.tokenizer)))
        initialise(self.decoder)
        matrices = [p for p in self.decoder.layers.parameters() if p.dim() == 2]
        others = [p for n, p in self.decoder.named_parameters() if p.dim() == 1 or "embed" in n]
        groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.05}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
        self.progress: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0, "loss": math.nan, "log": []}

    def resume(self, directory: Path) -> None:
        """Mutates: all of it, to what `checkpoint` wrote."""
        state = torch.load(directory / "checkpoint.pt", weights_only=True)  # tensors and numbers, no code
        self.decoder.load_state_dict(state["decoder"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = state["progress"]
        self.say(f"resumed after {self.progress['seconds'] / 60:.1f} minutes")

    def run(self) -> None:
        """Trains until the minutes are over, on the wall clock, all resumed runs counted together."""
        now = self.progress
        reader = Reader(self.tokenizer, f"{SEED}, from step {now['step']}")
        start = time.monotonic() - now["seconds"]
        while (share := now["seconds"] / (60 * self.minutes)) < 1:
            tokens, weights = reader.batch([facts for since, facts in GROWTH if since <= share][-1])
            self.update(tokens, weights, share)
            now["seconds"] = time.monotonic() - start
            if now["step"] % 100 == 0:
                minutes, millions, loss = now["seconds"] / 60, now["tokens"] / 1e6, now["loss"]
                self.say(f"{minutes:5.1f} min {now['step']:6} steps {millions:6.2f}M tokens, loss {loss:.4f}")
            if now["step"] % STEPS_PER_CHECKPOINT == 0:
                self.checkpoint()
        self.checkpoint()

    def update(self, tokens: Tensor, weights: Tensor, share: float) -> None:
        """One optimizer step at `share` of the whole time. Mutates: decoder, optimizer, progress."""
        now = self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(now["step"], share)
        loss, of_answers = answer_loss(self.decoder, tokens, weights)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        self.optimizer.step()
        now["step"] += 1
        now["tokens"] += tokens.numel()
        now["loss"] = of_answers if math.isnan(now["loss"]) else 0.98 * now["loss"] + 0.02 * of_answers

    def say(self, line: str) -> None:
        """Prints a line and keeps it for training_log.txt. Mutates: progress."""
        self.progress["log"].append(line)
        print(line, flush=True)

    def checkpoint(self) -> None:
        """Writes the model, the log, and what `resume` reads."""
        state = {"decoder": self.decoder.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "progress": self.progress}, self.out / "checkpoint.pt")
        save_file(hf_tensors(self.decoder), self.out / "model.safetensors", metadata={"format": "pt"})
        (self.out / "config.json").write_text(json.dumps(hf_config(self.tokenizer), indent=2) + "\n")
        self.tokenizer.save(str(self.out / "tokenizer.json"))
        (self.out / "training_log.txt").write_text("\n".join(self.progress["log"]) + "\n")


def hf_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The weights in bfloat16 under Hugging Face's names, fused projections taken apart, without lm_head."""
    config = decoder.config
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"qkv_proj": [query, kv, kv], "gate_up_proj": [config.intermediate_size] * 2}
    tensors = {}
    for name, weight in decoder.state_dict().items():
        module = name.split(".")[-2]
        parts = FUSED.get(module, (module,))
        for part, rows in zip(parts, weight.split(sizes.get(module, len(weight))), strict=True):
            tensors[f"model.{name.replace(module, part)}"] = rows.bfloat16().contiguous()
    del tensors["model.lm_head.weight"]
    return tensors


def main() -> None:
    """Trains a tiny model from the command line."""
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=48.0)
    parser.add_argument("--resume", type=Path, help="directory of an interrupted run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(options.out, options.minutes)
    trainer.say(f"{sum(p.numel() for p in trainer.decoder.parameters()):,} parameters")
    if options.resume is not None:
        trainer.resume(options.resume)
    trainer.run()


if __name__ == "__main__":
    main()
