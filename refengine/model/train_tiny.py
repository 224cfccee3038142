"""How the shipped models were made, and how to make them again: one thread, an hour at most.

    python -m refengine.model.train_tiny --out DIR --minutes 48
    python -m refengine.model.train_tiny --out DIR --minutes 48 --resume DIR    # after an interruption
    python -m refengine.model.train_tiny --model hybrid --out DIR --minutes 60

A model must learn one thing: to find in its context the fact that a question is about, and to repeat it.
That takes two heads in a row (an induction circuit): one tells each token what stood before it, the other
searches for the place where the same words stood before. Small networks find it late. What helps:

* the answer repeats the words of the fact, so the same n-gram leads to the value in both places;
* two heads of layer 0 begin as what they would have to become: heads that look one and two tokens back
  (the hybrid has a short convolution there, which is born with it);
* many questions about a world are asked in one row, and answers count twenty times as much as the rest;
* worlds are small at first and grow;
* the hybrid, with a single layer that sees the whole text, first reads many rows of random tokens that repeat
  themselves, and that layer hardly turns its queries and keys (a large rope base): words match at any distance.

Writes a Hugging Face directory, training_log.txt, and checkpoint.pt to resume from.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from refengine.model.config import ModelConfig
from refengine.model.decoder import Decoder
from refengine.model.loader import FUSED
from refengine.model.train_tiny_reader import Batch, HybridReader, Reader
from refengine.model.train_tiny_recipes import (
    RECIPES,
    SEED,
    Recipe,
    hf_config,
    initialise,
    train_tokenizer,
)
from refengine.model.uncached import attend_rows, recur_rows

LEARNING_RATE, WARMUP_STEPS = 3e-3, 50
STEPS_PER_CHECKPOINT = 500


def answer_loss(decoder: Decoder, batch: Batch) -> tuple[Tensor, float]:
    """The weighted loss to minimise, and the mean loss of the answer tokens alone, in nats per token."""
    tokens, weights, reach = batch
    rows, width = tokens[:, 1:].shape
    attend = attend_rows(decoder.config, rows, reach)
    recur = recur_rows(decoder.config, rows)
    with torch.autocast("cpu", torch.bfloat16):
        positions = torch.arange(width).repeat(rows)
        hidden = decoder(tokens[:, :-1].flatten(), positions, attend, recur=recur)
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

    def __init__(self, recipe: Recipe, out: Path, minutes: float) -> None:
        self.recipe, self.out, self.minutes = recipe, out, minutes
        out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = train_tokenizer(recipe)
        self.decoder = Decoder(ModelConfig.from_hf(hf_config(self.recipe, self.tokenizer)))
        initialise(self.decoder, recipe)
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
        recipe = self.recipe
        reader_class = HybridReader if recipe.counts else Reader
        seed = f"{SEED}, from step {now['step']}"
        reader = reader_class(self.tokenizer, seed, recipe.tokens_per_step)
        start = time.monotonic() - now["seconds"]
        while (share := now["seconds"] / (60 * self.minutes)) < 1:
            self.update(reader.batch(share), share)
            now["seconds"] = time.monotonic() - start
            if now["step"] % 100 == 0:
                minutes, millions, loss = now["seconds"] / 60, now["tokens"] / 1e6, now["loss"]
                self.say(f"{minutes:5.1f} min {now['step']:6} steps {millions:6.2f}M tokens, loss {loss:.4f}")
            if now["step"] % STEPS_PER_CHECKPOINT == 0:
                self.checkpoint()
        self.checkpoint()

    def update(self, batch: Batch, share: float) -> None:
        """One optimizer step at `share` of the whole time. Mutates: decoder, optimizer, progress."""
        now = self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(now["step"], share)
        loss, of_answers = answer_loss(self.decoder, batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        self.optimizer.step()
        now["step"] += 1
        now["tokens"] += batch.tokens.numel()
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
        (self.out / "config.json").write_text(
            json.dumps(hf_config(self.recipe, self.tokenizer), indent=2) + "\n"
        )
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
    """Trains a model from the command line."""
    parser = argparse.ArgumentParser(description="Train one of the shipped models.")
    parser.add_argument("--model", choices=RECIPES, default="tiny")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=48.0)
    parser.add_argument("--resume", type=Path, help="directory of an interrupted run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(RECIPES[options.model], options.out, options.minutes)
    trainer.say(f"{sum(p.numel() for p in trainer.decoder.parameters()):,} parameters")
    if options.resume is not None:
        trainer.resume(options.resume)
    trainer.run()


if __name__ == "__main__":
    main()
