"""From logits to the next token: what a request may ask for, and how one is drawn.

Greedy by default, because the course compares decisions and a coin would hide them. A request with a seed
draws from its own generator, so its text does not depend on who shares its batch.
vLLM: V0 model_executor/layers/sampler.py, V1 v1/sample/sampler.py and v1/sample/ops/topk_topp_sampler.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from refengine.config import Options
from refengine.errors import ConfigError

GREEDY_BELOW = (
    1e-5  # a temperature this small divides logits into infinities; it can only mean "the best one"
)


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
        self.at_least(temperature=0, top_k=0, top_p=0, max_tokens=1, logprobs=0, prompt_logprobs=0)
        if not math.isfinite(self.temperature):
            raise ConfigError(f"temperature must be finite, not {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        for name in ("top_k", "max_tokens", "logprobs", "prompt_logprobs", "seed"):
            value = getattr(self, name)
            if value is not None and not _is_int(value):
                raise ConfigError(f"{name} must be a whole number, not {value!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(f"stop must be texts of at least one character, not {self.stop!r}")
        if not all(_is_int(token) and token >= 0 for token in self.stop_token_ids):
            raise ConfigError(f"stop_token_ids must be token ids, not {self.stop_token_ids!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """A fresh generator for a request with a seed, None without."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability, and its place among all tokens (1: the most likely)."""

    logprob: float
    rank: int


# (logits [n, vocab_size], one params and one generator per row) -> token ids [n]
Sampler = Callable[[Tensor, Sequence[SamplingParams], Sequence[torch.Generator | None]], Tensor]


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
        least = scaled.topk(max(k for k in top_k), dim=-1).values
        kth = least.gather(1, _column(top_k, logits).long() - 1)
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    if any(p.top_p < 1 for p in params):
        ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(
            dim=-1
        )  # probability of all better ones
        cut = before >= _column([p.top_p for p in params], logits)
        cut[:, 0] = False
        scaled = scaled.masked_fill(torch.zeros_like(cut).scatter(1, index, cut), -torch.inf)
    return scaled.softmax(dim=-1)


def draw(probs: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """One token per row with these probabilities. Returns `[n]` int64. Mutates: the generators.

    An exponential clock with rate p rings first with probability p / sum, so the smallest clock / p is a
    draw; unlike `multinomial` it needs one generator per row only where the noise is made.
    """
    clock = torch.empty_like(probs)
    shared = [i for i, generator in enumerate(generators) if generator is None]
    if shared:
        clock[shared] = torch.empty_like(probs[shared]).exponential_()
    for row, generator in enumerate(generators):
        if generator is not None:
            clock[row].exponential_(generator=generator)
    return (probs / clock).argmax(dim=-1)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_best: int) -> list[dict[int, Logprob]]:
    """For each row the chosen token and the `num_best` most likely ones, by token id, chosen first.

    Always of the raw logits: temperature, top-k and top-p shape the choice, not the report.

    Args:
        logits: `[n, vocab_size]`.
        token_ids: `[n]` int64, the tokens that were chosen (or, for a prompt, that came next).
    vLLM: V0 `get_logprobs` in sampler.py, V1 `Sampler.gather_logprobs`.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs >= chosen).sum(dim=-1).tolist()
    best = logprobs.topk(min(num_best, logits.shape[-1]), dim=-1)
    rows = zip(
        token_ids.tolist(),
        chosen[:, 0].tolist(),
        ranks,
        best.indices.tolist(),
        best.values.tolist(),
        strict=True,
    )
    return [
        {token: Logprob(logprob, rank)}
        | {
            t: Logprob(value, place)
            for place, (t, value) in enumerate(zip(tokens, values, strict=True), start=1)
        }
        for token, logprob, rank, tokens, values in rows
    ]


def prompt_logprobs(logits: Tensor, prompt: Sequence[int], num_best: int) -> list[dict[int, Logprob] | None]:
    """Log-probabilities of a prompt's own tokens: None for the first, which nothing predicts.

    Args:
        logits: `[len(prompt) - 1 or more, vocab_size]`, row i predicts token i + 1.
    """
    following = torch.tensor(prompt[1:], device=logits.device, dtype=torch.int64)
    return [None, *token_logprobs(logits[: len(following)], following, num_best)]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=torch.float32)[:, None]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
