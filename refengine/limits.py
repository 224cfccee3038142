"""What an engine can serve at all: checked before a request enters, so that a bad one changes nothing.

vLLM: V0 engine/llm_engine.py _validate_model_inputs, V1 v1/engine/input_processor.py; what could never fit the
cache is refused by V0's scheduler (ignored) and by V1 at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from refengine.config import EngineConfig, is_int
from refengine.errors import ConfigError, RequestError
from refengine.model.config import ModelConfig
from refengine.sampling import SamplingParams


@dataclass(frozen=True)
class RequestLimits:
    """`max_model_len` in tokens, prompt and output together; `num_blocks` are those that can be handed out."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_blocks_at_peak: Callable[[int], int] | None = (
        None  # for so many tokens; None: one block table, all of it
    )

    def check(self, request_id: str, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RequestError, with the reason, for a request that could never be served."""
        num_tokens = len(token_ids)
        if num_tokens == 0:
            raise RequestError(
                request_id, "the prompt is empty; at least one token is needed to predict the next"
            )
        for token_id in token_ids:
            if not is_int(token_id) or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    request_id, f"token id {token_id!r} is not in the vocabulary (0 to {self.vocab_size - 1})"
                )
        if num_tokens >= self.max_model_len:
            raise RequestError(
                request_id,
                f"the prompt has {num_tokens} tokens, but prompt and output together are limited to "
                f"{self.max_model_len}",
            )
        # The last sampled token is never computed and needs no slot.
        longest = min(num_tokens + params.max_tokens, self.max_model_len) - 1
        needed = (self.num_blocks_at_peak or self._num_blocks_for)(longest)
        if needed > self.num_blocks:
            raise RequestError(
                request_id,
                f"it can never fit: {num_tokens} prompt tokens and up to {params.max_tokens} more need {needed} "
                f"blocks, and the whole cache has {self.num_blocks}",
            )

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens a request may have. Raises: ConfigError if the options do not fit the model or one another."""
    limit = config.max_model_len or model.max_model_len
    if limit > model.max_model_len:
        raise ConfigError(
            f"max_model_len {limit} is beyond what the model was made for, {model.max_model_len} tokens"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < limit:
        raise ConfigError(
            f"without chunked prefill a prompt must fit in one step: max_num_batched_tokens "
            f"{config.max_num_batched_tokens} is below max_model_len {limit}"
        )
    return limit
