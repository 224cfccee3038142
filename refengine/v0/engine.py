"""V0's engine: schedule, execute, update, once per step.

The same three lines as in V1, and another division of labour: the scheduler hands the hit on as block ids, the
worker leaves the computed tokens out, and the engine counts them as computed all the same.
vLLM: V0 engine/llm_engine.py LLMEngine.step, _process_model_outputs; V1 v1/engine/core.py EngineCore.step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf

from refengine.config import EngineConfig
from refengine.cuda_graphs import GraphedDecode, GraphLimits
from refengine.errors import ConfigError, RequestError
from refengine.hashing import Adapter
from refengine.kv_cache import KVCache
from refengine.limits import RequestLimits, max_model_len
from refengine.model.config import FULL_ATTENTION, ModelConfig
from refengine.model.decoder import Decoder
from refengine.outputs import SampledTokens, StepOutput
from refengine.parts import Parts
from refengine.sampling import SamplingParams
from refengine.sizing import choose_num_blocks
from refengine.trace.observer import Observer, PoolSnapshot
from refengine.v0.block_manager import BlockManager
from refengine.v0.scheduler import Scheduler
from refengine.v0.scheduler_output import SchedulerOutputs
from refengine.v0.sequence import Sequence, SequenceGroup, SequenceGroupMetadata, SequenceStatus
from refengine.v0.worker import Worker

V0_SLOTS = {"sampler", "attention"}  # the parts of `refengine.parts` that V0 has a place for


class LLMEngine:
    """Requests in, tokens out. Knows token ids only; text is the business of `LLM`."""

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        eos_token_ids: SequenceOf[int] = (),
        observer: Observer | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Raises: ConfigError if the options do not fit the model or one another."""
        self.parts = parts or Parts()
        _refuse_what_v0_has_not(config, self.parts)
        _refuse_sparse_layers(model.config)
        self.config = config
        self.observer = observer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len(config, model.config)
        dtype, device = model.embed_tokens.weight.dtype, model.embed_tokens.weight.device
        self.num_blocks = choose_num_blocks(config, model)
        self.limits = RequestLimits(
            model.config.vocab_size, self.max_model_len, config.block_size, self.num_blocks
        )
        self.block_manager = BlockManager(
            config.block_size,
            self.num_blocks,
            config.num_cpu_blocks,
            watermark=config.watermark,
            enable_caching=config.enable_prefix_caching,
            faithful=config.mode == "faithful",
        )
        self.scheduler = Scheduler(config, self.block_manager, self.max_model_len, observer)
        self.worker = Worker(
            model,
            [KVCache(model.config, self.num_blocks, config.block_size, dtype, device)],
            [self._cpu_cache(model)],
            chunked_prefill=config.enable_chunked_prefill,
            backend=self.parts.attention or config.backend,
            graph_limits=GraphLimits.of(config, self.max_model_len) if config.cuda_graphs else None,
            sampler=self.parts.sampler,
            observer=observer,
        )
        self.groups: dict[str, SequenceGroup] = {}
        self._undelivered: list[StepOutput] = []  # of a step after which something was interrupted
        self._seq_ids = itertools.count()
        self._clock = itertools.count(1)  # V0 orders uses of blocks by time; steps do as well
        if observer is not None:
            observer.attach("v0", self.num_blocks, config.block_size, self.snapshot)

    def _cpu_cache(self, model: Decoder) -> KVCache | None:
        """Where swapped-out blocks go, if there are any CPU blocks."""
        config, dtype = self.config, model.embed_tokens.weight.dtype
        return (
            KVCache(model.config, config.num_cpu_blocks, config.block_size, dtype)
            if config.num_cpu_blocks
            else None
        )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        adapter: Adapter | None = None,
        cache_salt: str | None = None,
        report_full: bool = False,
    ) -> None:
        """Enters a request. Mutates: the waiting queue.

        Raises: RequestError, with nothing changed, if the request could never be served, or asks for what V0 has
        not: a cache salt, KV events.
        """
        if request_id in self.groups:
            raise RequestError(request_id, "the id is in use by an unfinished request")
        if cache_salt is not None or report_full:
            raise RequestError(request_id, "V0 knows neither cache salts nor KV events")
        self.limits.check(request_id, prompt_token_ids, params)
        if adapter is not None:
            in_use = (group.first_seq.adapter for group in self.groups.values())
            self.worker.adapters.load(request_id, adapter, in_use)
        seq_id = next(self._seq_ids)
        seq = Sequence(seq_id, prompt_token_ids, adapter)
        seeded = params.seeded(self.config.seed + seq_id)
        group = SequenceGroup(request_id, [seq], seeded, arrival=seq_id, priority=priority)
        self.groups[request_id] = group
        self.scheduler.add(group)

    def step(self) -> list[StepOutput]:
        """One step of all requests: schedule, execute, update. Returns: what it added to each.

        If the model fails, or somebody presses Ctrl-C, the step is taken back and its requests start over.
        Mutates: everything below.
        """
        if self.observer is not None:
            self.observer.begin_step()
        try:
            metadata, scheduled = self.scheduler.schedule(float(next(self._clock)))
            self._run(metadata, scheduled)
        finally:  # who was found to be impossible must be told so, whatever happens to the step
            ignored = [group for group in self.groups.values() if group.is_finished]
            self._undelivered += [self._ignored(group) for group in ignored]
        if self.config.check_integrity:
            self.block_manager.check_integrity()
        if self.observer is not None:
            self.observer.end_step()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _run(self, metadata: list[SequenceGroupMetadata], scheduled: SchedulerOutputs) -> None:
        try:
            sampled = self.worker.execute(metadata, scheduled)
            self._update(metadata, scheduled, sampled)
        except (
            BaseException
        ):  # Ctrl-C included: blocks count as computed for a step that did not run to its end
            self.scheduler.take_back(scheduled)
            raise

    def _update(
        self, metadata: list[SequenceGroupMetadata], scheduled: SchedulerOutputs, sampled: SampledTokens
    ) -> None:
        """Counts computed tokens, appends sampled ones, ends what is done.

        Mutates: sequences, queues, blocks, and `_undelivered`, even if something breaks off half-way.
        """
        groups = [share.group for share in scheduled.scheduled]
        known = [len(group.first_seq) for group in groups]
        try:
            for each, share in zip(metadata, scheduled.scheduled, strict=True):
                seq = share.group.first_seq
                # The whole chunk counts, cached tokens included, although the worker computed fewer.
                seq.update_num_computed_tokens(share.token_chunk_size)
                for token_id in sampled.sampled.get(each.request_id, []):
                    seq.token_ids.append(token_id)
                    self._stop(share.group, seq)
            self.scheduler.free_finished()
        finally:
            self._undelivered += [
                _step_output(group, num_known, sampled)
                for group, num_known in zip(groups, known, strict=True)
            ]

    def _stop(self, group: SequenceGroup, seq: Sequence) -> None:
        """Ends a sequence whose last token says so. Mutates: its status, its blocks."""
        params, token_id = group.params, seq.token_ids[-1]
        if token_id in self.eos_token_ids and not params.ignore_eos:
            seq.status = SequenceStatus.FINISHED_STOPPED
        elif token_id in params.stop_token_ids:
            seq.status, seq.stop_reason = SequenceStatus.FINISHED_STOPPED, token_id
        elif len(seq) >= self.max_model_len or len(seq.output_token_ids) >= params.max_tokens:
            seq.status = SequenceStatus.FINISHED_LENGTH
        if seq.is_finished:
            self.block_manager.free(seq)
            del self.groups[group.request_id]
        if self.observer is not None:
            reason = seq.status.value if seq.is_finished else None
            self.observer.mark("append", group.request_id, token_id=token_id, finish_reason=reason)

    def _ignored(self, group: SequenceGroup) -> StepOutput:
        del self.groups[group.request_id]
        return StepOutput(group.request_id, [], SequenceStatus.FINISHED_IGNORED.value)

    def finish(self, request_id: str, reason: str = "abort") -> None:
        """Ends a request at once: "abort" for a caller that lost interest, "stop" for a stop string.

        Mutates: queues, blocks. A request that is not there (any more) is fine.
        """
        if self.groups.pop(request_id, None) is not None:
            self.scheduler.abort(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.groups)

    @property
    def kv_cache(self) -> KVCache:
        """The tensors, for whoever wants to look or to spoil them."""
        return self.worker.gpu_caches[0]

    @property
    def graphs(self) -> GraphedDecode | None:
        """The recorded decode steps; None where there are none to be."""
        return self.worker.graphs[0]

    def snapshot(self) -> PoolSnapshot:
        """How the GPU blocks stand now; its tables are by request id."""
        names = {str(seq.seq_id): group.request_id for group in self.groups.values() for seq in group.seqs}
        pool = self.block_manager.snapshot()
        return PoolSnapshot(pool.free, pool.cached, {names[seq_id]: t for seq_id, t in pool.tables.items()})

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns: False, with nothing changed, while a request runs."""
        return self.block_manager.reset_prefix_cache()


def _step_output(group: SequenceGroup, num_known: int, sampled: SampledTokens) -> StepOutput:
    """What a step added to a group that had `num_known` tokens before it."""
    seq = group.first_seq
    token_ids = seq.token_ids[num_known:]
    return StepOutput(
        group.request_id,
        token_ids,
        seq.status.value if seq.is_finished else None,
        seq.stop_reason,
        group.num_cached_tokens,
        sampled.logprobs.get(group.request_id, [])[: len(token_ids)],
        sampled.prompt_logprobs.get(group.request_id),
    )


def _refuse_what_v0_has_not(config: EngineConfig, parts: Parts) -> None:
    foreign = sorted(set(parts.replaced()) - V0_SLOTS)
    if foreign:
        raise ConfigError(f"V0 has no place for a part in {', '.join(foreign)}; use engine='v1'")
    if config.sliding_window is not None:
        raise ConfigError(
            "V0's models have no sliding-window layers; sliding_window is for the block manager"
        )
    if config.enable_kv_events:
        raise ConfigError("V0 has no KV events; use engine='v1'")
    share = config.max_num_batched_tokens // config.max_num_partial_prefills
    if config.enable_chunked_prefill and config.enable_prefix_caching and share < config.block_size:
        raise ConfigError(
            f"V0 cuts chunks at block ends when it caches prefixes, and max_num_batched_tokens "
            f"{config.max_num_batched_tokens} over max_num_partial_prefills {config.max_num_partial_prefills} is "
            f"below block_size {config.block_size}: no prompt would ever get a chunk"
        )


def _refuse_sparse_layers(config: ModelConfig) -> None:
    other = sorted(set(config.kinds) - {FULL_ATTENTION})
    if other:
        raise ConfigError(
            f"V0 has one block table for all layers, and this model has {' and '.join(other)} layers; use engine='v1' "
            "(vLLM 0.7.3 refused prefix caching for models with sliding windows)"
        )
