"""The engine: schedule, execute, update, once per step.

Data flows one way. Requests go into the scheduler, which asks the cache manager; its output goes through the
model runner; the sampled tokens go back into the scheduler.
vLLM: V0 engine/llm_engine.py LLMEngine.step; V1 v1/engine/core.py EngineCore.step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from refengine.config import EngineConfig
from refengine.cuda_graphs import GraphedDecode, GraphLimits
from refengine.errors import IntegrityError, PartError, RequestError
from refengine.hashing import Adapter, BlockHasher
from refengine.kv_cache import KVCache
from refengine.limits import RequestLimits, max_model_len
from refengine.model.decoder import Decoder
from refengine.outputs import SampledTokens, StepOutput
from refengine.parts import Parts
from refengine.sampling import SamplingParams
from refengine.sizing import choose_num_blocks
from refengine.trace.observer import Observer, PoolSnapshot
from refengine.v1.coordinator import MANAGERS
from refengine.v1.groups.spec import FULL_ATTENTION, SLIDING_WINDOW
from refengine.v1.input_batch import InputBatch
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.layer_groups import layer_groups
from refengine.v1.model_runner import ModelRunner
from refengine.v1.publisher import EventPublisher
from refengine.v1.request import Request, RequestStatus
from refengine.v1.scheduler_output import SchedulerOutput

MAX_IDLE_STEPS = (
    10  # an engine with work to do may stand still for a step, after a preemption, but not for ten
)


class EngineCore:
    """Requests in, tokens out. Knows token ids only; text is the business of `LLM`."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        eos_token_ids: Sequence[int] = (),
        observer: Observer | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Raises: ConfigError if the options do not fit the model or one another."""
        self.config = config
        self.max_model_len = max_model_len(config, model.config)
        self.observer = observer
        self.parts = parts = parts or Parts()
        dtype, device = model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
        self.num_blocks = choose_num_blocks(config, model)
        kv_cache = KVCache(model.config, self.num_blocks, config.block_size, dtype, device)
        self.groups = layer_groups(model.config, config.block_size)
        self.hasher = self._make_hasher() if config.enable_prefix_caching else None
        self.kv_cache_manager = self._make_manager()
        self.limits = RequestLimits(
            model.config.vocab_size,
            self.max_model_len,
            config.block_size,
            self.num_blocks - 1,
            self._num_blocks_at_peak,
        )
        self.scheduler = parts.scheduler(
            config, self.kv_cache_manager, self.max_model_len, eos_token_ids, observer
        )
        self.model_runner = ModelRunner(
            model,
            kv_cache,
            InputBatch(config.max_num_seqs, self.max_model_len, config.block_size, len(self.groups)),
            backend=parts.attention or config.backend,
            graph_limits=GraphLimits.of(config, self.max_model_len) if config.cuda_graphs else None,
            sampler=parts.sampler,
            observer=observer,
        )
        self.publisher = (
            EventPublisher()
        )  # KV events, if they are on: one batch per step that changed the index
        self._num_arrived = 0
        self._num_idle_steps = 0
        self._undelivered: list[StepOutput] = []  # of a step after which something was interrupted
        if observer is not None:
            observer.attach("v1", self.num_blocks, config.block_size, self.snapshot)

    def _make_hasher(self) -> BlockHasher:
        config = self.config
        return BlockHasher(
            config.hash_algorithm, config.block_size, config.hash_seed, hash_block=self.parts.hash_block
        )

    def _make_manager(self) -> KVCacheManager:
        config, parts = self.config, self.parts
        return parts.kv_cache_manager(
            [group.spec for group in self.groups],
            self.num_blocks,
            self.max_model_len,
            enable_caching=config.enable_prefix_caching,
            enable_events=config.enable_kv_events,
            watermark=config.watermark,
            retention_interval=config.prefix_cache_retention_interval,
            max_tokens_per_step=config.max_num_batched_tokens,
            observer=self.observer,
            make_block_pool=partial(parts.block_pool, make_free_queue=parts.free_queue),
            managers={
                **MANAGERS,
                FULL_ATTENTION: parts.full_attention,
                SLIDING_WINDOW: parts.sliding_window,
            },
            make_hybrid=parts.coordinator,
        )

    def _num_blocks_at_peak(self, num_tokens: int) -> int:
        """Blocks of all groups that a request holds at most on its way to `num_tokens` tokens."""
        per_step = self.config.max_num_batched_tokens
        groups = self.kv_cache_manager.coordinator.groups
        return sum(group.num_blocks_at_peak(num_tokens, per_step) for group in groups)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        adapter: Adapter | None = None,
        cache_salt: str | None = None,
        report_full: bool = False,
    ) -> None:
        """Enters a request. Mutates: the waiting queue.

        Raises: RequestError, with nothing changed, if the request could never be served.
        """
        if request_id in self.scheduler.requests:
            raise RequestError(request_id, "the id is in use by an unfinished request")
        self.limits.check(request_id, prompt_token_ids, params)
        if adapter is not None:
            in_use = (request.adapter for request in self.scheduler.requests.values())
            self.model_runner.adapters.load(request_id, adapter, in_use)
        arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
        params = params.seeded(self.config.seed + arrival)
        self.scheduler.add_request(
            Request(
                request_id,
                prompt_token_ids,
                params,
                hasher=self.hasher,
                arrival=arrival,
                priority=priority,
                adapter=adapter,
                cache_salt=cache_salt,
                report_full=report_full,
            )
        )

    def step(self) -> list[StepOutput]:
        """One step of all requests: schedule, execute, update. Returns: what it added to each.

        If the model fails, or somebody presses Ctrl-C, the step is taken back and its requests start over.
        Mutates: everything below.
        """
        if self.observer is not None:
            self.observer.begin_step()
        scheduler_output = self.scheduler.schedule()
        self._check_progress(scheduler_output)
        try:
            sampled = self.model_runner.execute(scheduler_output)
            self._update(scheduler_output, sampled)
        except BaseException:  # Ctrl-C included: blocks were published for a step that did not run to its end
            with suppress(PartError, IntegrityError):  # a broken part: its first error counts
                self.scheduler.take_back(scheduler_output)
            raise
        if self.config.check_integrity or self.parts.replaced():
            self._check_integrity()
        if self.observer is not None:
            self.observer.end_step()
        self._publish_events()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _update(self, scheduler_output: SchedulerOutput, sampled: SampledTokens) -> None:
        """Applies the sampled tokens. Mutates: requests, and `_undelivered`, even if something breaks off half-way."""
        requests = [self.scheduler.requests[share.request_id] for share in scheduler_output.scheduled]
        known = {request.request_id: request.num_tokens for request in requests}
        try:
            self.scheduler.update(scheduler_output, sampled.sampled)
        finally:
            self._undelivered += [
                _step_output(request, known[request.request_id], sampled) for request in requests
            ]

    def finish(self, request_id: str, reason: str = "abort") -> None:
        """Ends a request at once: "abort" for a caller that lost interest, "stop" for a stop string.

        Mutates: queues, blocks. A request that is not there (any more) is fine.
        """
        self.scheduler.finish(request_id, RequestStatus(reason))

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests

    @property
    def kv_cache(self) -> KVCache:
        """The tensors, for whoever wants to look or to spoil them."""
        return self.model_runner.kv_cache

    @property
    def graphs(self) -> GraphedDecode | None:
        """The recorded decode steps; None where there are none to be."""
        return self.model_runner.graphs

    def snapshot(self) -> PoolSnapshot:
        """How the blocks stand now."""
        return self.kv_cache_manager.snapshot()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns: False, with nothing changed, while a request runs."""
        done = self.kv_cache_manager.reset_prefix_cache()
        self._publish_events()
        return done

    def _publish_events(self) -> None:
        """Sends what changed in the index. Mutates: the event queue, the subscribers."""
        self.publisher.publish(self.kv_cache_manager.take_events())

    def _check_progress(self, scheduler_output: SchedulerOutput) -> None:
        """Raises IntegrityError, or PartError, when step after step nothing is scheduled although requests wait."""
        is_idle = not scheduler_output.scheduled and self.has_unfinished_requests
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle else 0
        if self._num_idle_steps == MAX_IDLE_STEPS:
            self._num_idle_steps = 0
            waiting = len(self.scheduler.requests)
            self._blame(
                IntegrityError(
                    f"nothing was scheduled in {MAX_IDLE_STEPS} steps, and {waiting} requests wait"
                )
            )

    def _check_integrity(self) -> None:
        """Raises IntegrityError, or PartError, unless all structures agree with one another."""
        try:
            self.scheduler.check_integrity()
        except IntegrityError as error:
            self._blame(error)

    def _blame(self, error: IntegrityError) -> NoReturn:
        """Raises the error, or a PartError naming the parts that are not ours, since one of them is at fault."""
        suspects = ", ".join(f"{slot} ({name})" for slot, name in self.parts.replaced().items())
        if not suspects:
            raise error
        raise PartError(f"part {suspects}: after a step, {error}") from error


def _step_output(request: Request, num_known: int, sampled: SampledTokens) -> StepOutput:
    """What a step added to a request that had `num_known` tokens before it."""
    token_ids = request.token_ids[num_known:]
    return StepOutput(
        request.request_id,
        token_ids,
        request.status.value if request.status.is_finished else None,
        request.stop_reason,
        request.num_cached_tokens,
        sampled.logprobs.get(request.request_id, [])[: len(token_ids)],
        sampled.prompt_logprobs.get(request.request_id),
    )
