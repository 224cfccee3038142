"""From logits to the next token: what a request may ask for, and how one is drawn.

Greedy by default, because the course compares decisions and a coin would hide them. A request with a seed
draws from its own generator, so its text does not depend on who shares its batch.
vLLM: V0 model_executor/layers/sampler.py, V1 v1/sample/sampler.py and v1/sample/ops/topk_topp_sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from refengine.config import Options, is_int
from refengine.errors import ConfigError

# Dividing by a temperature this small gives infinities; it can only mean "the best one".
GREEDY_BELOW = 1e-5


SEED_STRIDE = 1_000_003  # spreads the seeds of neighbouring requests over positions


@dataclass(frozen=True)
class SamplingParams(Options):
    """How one request is sampled and when it stops. Lists are accepted and kept as tuples.

    Raises: ConfigError with one sentence for a value out of range.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # draw among the k best; 0: all
    top_p: float = 1.0  # draw among the fewest best whose probabilities reach p; 1: all
    seed: int | None = None
    stop: str | Sequence[str] = ()  # text that ends the request; it is not part of the output
    stop_token_ids: Sequence[int] = ()
    max_tokens: int = 16
    ignore_eos: bool = False
    logprobs: int | None = None  # log-probabilities of this many best tokens besides the chosen one's
    prompt_logprobs: int | None = None  # the same for every prompt token

    def __post_init__(self) -> None:
        self.at_least(temperature=0, top_k=0, max_tokens=1, logprobs=0, prompt_logprobs=0)
        self.check_kinds()
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop)
        if stop is None or not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(f"stop must be texts of at least one character, not {self.stop!r}")
        stop_token_ids = _as_tuple(self.stop_token_ids)
        if stop_token_ids is None or not all(is_int(token) and token >= 0 for token in stop_token_ids):
            raise ConfigError(f"stop_token_ids must be token ids, not {self.stop_token_ids!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken, so that no seed matters."""
        return self.temperature < GREEDY_BELOW

    def seeded(self, seed: int) -> SamplingParams:
        """These parameters, with this seed if they need one and bring none: every run can be repeated."""
        return self if self.greedy or self.seed is not None else replace(self, seed=seed)


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability, and its place among all tokens (1: the most likely)."""

    logprob: float
    rank: int


# (logits [n, vocab_size], one params and one generator per row) -> token ids [n]
Sampler = Callable[[Tensor, Sequence[SamplingParams], Sequence[torch.Generator | None]], Tensor]


def position_generator(
    params: SamplingParams, position: int, device: torch.device | str = "cpu"
) -> torch.Generator | None:
    """The randomness of a request's token at `position`: a function of seed and position alone.

    So neither batch neighbours nor preemption, after which a request starts over, change what a seed gives.
    Returns: None for a greedy request and for one without a seed.
    """
    if params.greedy or params.seed is None:
        return None
    return torch.Generator(device).manual_seed((params.seed * SEED_STRIDE + position) % 2**63)


def sample(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> Tensor:
    """Chooses one token per row.

    Args:
        logits: `[n, vocab_size]`.
        params, generators: one per row; None draws from torch's global generator.
    Returns: token ids `[n]` int64.
    Mutates: the generators of rows that are not greedy, by one draw each.
    """
    best = logits.argmax(dim=-1)
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    if drawn:
        chosen = [params[i] for i in drawn]
        best[drawn] = draw(probabilities(logits[drawn], chosen), [generators[i] for i in drawn])
    return best


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What each row is drawn from, after temperature, then top-k, then top-p. `[n, vocab_size]` float32.

    Tokens that tie with the k-th best are all kept. top-p counts probabilities after top-k has cut, and the
    token that reaches p is still in: otherwise p = 0.5 with a best token of 0.6 would leave nothing.
    """
    scaled = logits.float() / _column([p.temperature for p in params], logits)
    vocab_size = logits.shape[-1]
    top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
    if min(top_k) < vocab_size:
        best = scaled.topk(max(top_k), dim=-1).values
        kth = best.gather(1, _column(top_k, logits).long() - 1)
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    if any(p.top_p < 1 for p in params):
        probs, index = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        better = probs.cumsum(dim=-1) - probs  # probability of all tokens before this one
        out = better >= _column([p.top_p for p in params], logits)  # never the first: top_p > 0
        scaled = scaled.masked_fill(torch.zeros_like(out).scatter(1, index, out), -torch.inf)
    return scaled.softmax(dim=-1)


def draw(probs: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """One token per row with these probabilities. Returns `[n]` int64. Mutates: the generators.

    Of clocks that ring at random, token t's at rate p(t), the one of t rings first with probability p(t). A
    clock of rate p is one of rate 1 divided by p, so the noise needs no probabilities, and only making it
    needs a generator: the rest is one operation for all rows.
    """
    clock = torch.ones_like(probs)
    if None in generators:
        clock.exponential_()
    for row, generator in enumerate(generators):
        if generator is not None:
            clock[row].exponential_(generator=generator)
    tiny = torch.finfo(clock.dtype).tiny  # a clock of exactly 0 would let an impossible token win
    return (probs / clock.clamp_(min=tiny)).argmax(dim=-1)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_best: int) -> list[dict[int, Logprob]]:
    """For each row the chosen token and the `num_best` most likely ones, by token id, chosen first.

    Always of the raw logits: temperature, top-k and top-p shape the choice, not the report. The chosen token
    has rank 1 if none is likelier, as in V0; V1 also counts those that tie with it.

    Args:
        logits: `[n, vocab_size]`.
        token_ids: `[n]` int64, the tokens that were chosen (or, for a prompt, that came next).
    vLLM: V0 `get_logprobs` in sampler.py, V1 `Sampler.gather_logprobs`.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    best = logprobs.topk(min(num_best, logits.shape[-1]), dim=-1)
    rows = []
    for i, token in enumerate(token_ids.tolist()):
        row = {token: Logprob(float(chosen[i, 0]), int(ranks[i]))}
        for place, (t, value) in enumerate(
            zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True)
        ):
            row.setdefault(t, Logprob(value, place + 1))
        rows.append(row)
    return rows


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=torch.float32)[:, None]


def _as_tuple(values: object) -> tuple[Any, ...] | None:
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
