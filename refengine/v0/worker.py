"""V0's worker: memory orders first, then the model, then the sampler.

The scheduler only decides on block ids; here blocks really move. The order matters: a block that is swapped in
or copied must be in place before attention reads it or a new token is written into it.
vLLM: V0 worker/worker.py Worker.execute_worker, worker/worker_base.py, worker/model_runner.py ModelRunner,
worker/cache_engine.py CacheEngine; V1 has no memory orders, see refengine/v1/model_runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import kernels
from kernels import Backend, plan_step
from refengine.attention import AttentionMetadata, causal_attention, choose_backend
from refengine.cuda_graphs import GraphLimits, LayerTable, graphs_for
from refengine.gpu import new_stream, on_stream, to_device
from refengine.kv_cache import KVCache
from refengine.model.decoder import Decoder
from refengine.model.lora import LoadedAdapters
from refengine.outputs import SampledTokens
from refengine.sampling import Sampler, position_generator, sample, token_logprobs
from refengine.trace.observer import Observer
from refengine.v0.model_input import ModelInput, ModelInputBuilder
from refengine.v0.scheduler_output import SchedulerOutputs
from refengine.v0.sequence import SequenceGroupMetadata


class PhasedAttention:
    """The `attend` of one step: one kernel for the prompts, another for the decodes.

    A prompt without any hit in its step never reads a page: it attends to the keys and values it has just made.
    """

    def __init__(self, kv_cache: KVCache, model_input: ModelInput, backend: Backend) -> None:
        self.layers, self.input, self.backend = kv_cache.layers, model_input, backend
        key_cache = kv_cache.layers[0][0]
        metadata = metadata_of(model_input).to(key_cache.device)
        self.slots, self.tables, self.seq_lens = (
            metadata.slot_mapping,
            metadata.block_tables,
            metadata.seq_lens,
        )
        n, tokens = model_input.num_prefills, model_input.num_prefill_tokens
        self.prompts_read_pages = any(model_input.block_tables[:n])
        if self.prompts_read_pages:
            starts = metadata.query_start_loc[: n + 1]
            self.prompts = plan_step(
                backend, self.slots[:tokens], self.tables[:n], starts, self.seq_lens[:n], key_cache
            )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query `[num_tokens, num_heads, head_dim]`; prompts first. Mutates: the cache of this layer."""
        key_cache, value_cache = self.layers[layer]
        self.backend.reshape_and_cache(key, value, key_cache, value_cache, self.slots)
        n, tokens = self.input.num_prefills, self.input.num_prefill_tokens
        scale = query.shape[-1] ** -0.5
        parts = []
        if self.prompts_read_pages:
            parts.append(self.prompts.attend(query[:tokens], key_cache, value_cache, scale))
        elif n:
            parts.append(self._prompts_alone(layer, query[:tokens], key[:tokens], value[:tokens]))
        if n < len(self.input.seq_lens):
            parts.append(
                self.backend.paged_attention_decode(
                    query[tokens:], key_cache, value_cache, self.tables[n:], self.seq_lens[n:], scale
                )
            )
        return torch.cat(parts)

    def _prompts_alone(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lens = self.input.query_lens[: self.input.num_prefills]
        each = zip(query.split(lens), key.split(lens), value.split(lens), strict=True)
        return torch.cat([causal_attention(layer, q, k, v) for q, k, v in each])


def metadata_of(model_input: ModelInput) -> AttentionMetadata:
    """A step's metadata as tensors on the host."""
    return AttentionMetadata(
        torch.tensor(model_input.slot_mapping),
        torch.tensor(model_input.block_tables, dtype=torch.int64),
        torch.tensor(model_input.query_start_loc),
        torch.tensor(model_input.seq_lens),
    )


class Worker:
    """One KV cache per virtual engine, on the GPU and on the CPU; without pipeline stages there is one of each."""

    def __init__(
        self,
        model: Decoder,
        gpu_caches: Sequence[KVCache],
        cpu_caches: Sequence[KVCache | None],
        builder: type[ModelInputBuilder] = ModelInputBuilder,
        *,
        chunked_prefill: bool = False,
        backend: str | Backend | None = None,
        graph_limits: GraphLimits | None = None,
        sampler: Sampler = sample,
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self.adapters = LoadedAdapters(model)
        self.gpu_caches = gpu_caches
        self.cpu_caches = cpu_caches
        self.builder = builder
        self.chunked_prefill = chunked_prefill
        self.device = model.embed_tokens.weight.device
        self.backend = choose_backend(self.device, backend)
        self.stream = new_stream(self.device)
        tables = [LayerTable()] * model.config.num_layers
        self.graphs = [
            graphs_for(model, cache, self.backend, tables, graph_limits, self.stream) for cache in gpu_caches
        ]
        self.sampler = sampler
        self.observer = observer

    @torch.inference_mode()
    def execute(
        self, metadata: Sequence[SequenceGroupMetadata], out: SchedulerOutputs, virtual_engine: int = 0
    ) -> SampledTokens:
        """Runs one step. Mutates: the KV caches. Raises: RequestError naming the request that cannot be built."""
        builder = self.builder(
            self.gpu_caches[virtual_engine].block_size, chunked_prefill=self.chunked_prefill
        )
        for group in metadata:
            builder.add_seq_group(group)
        with on_stream(self.stream):
            self._move_blocks(out, virtual_engine)
            if not metadata:
                return SampledTokens()
            model_input = builder.build()
            if self.observer is not None:
                for group, seq in zip(metadata, builder.seqs, strict=True):
                    self.observer.mark(
                        "run", group.request_id, start=seq.context_len, num_tokens=seq.query_len
                    )
            return self._sample(metadata, model_input, self._forward(model_input, virtual_engine))

    def _forward(self, model_input: ModelInput, virtual_engine: int) -> Tensor:
        """The hidden states of the step, from a graph if there is one for it. Mutates: the KV cache."""
        tokens, positions = torch.tensor(model_input.input_tokens), torch.tensor(model_input.input_positions)
        adapt = self.adapters.for_tokens(model_input.lora_mapping)
        graphs = self.graphs[virtual_engine]
        if graphs is not None and adapt is None and model_input.num_prefills == 0:
            hidden = graphs.run(tokens, positions, [metadata_of(model_input)])
            if hidden is not None:
                return hidden
        attend = PhasedAttention(self.gpu_caches[virtual_engine], model_input, self.backend)
        tokens, positions = to_device(tokens, self.device), to_device(positions, self.device)
        return self.model(tokens, positions, attend, adapt)  # type: ignore[no-any-return]

    def _move_blocks(self, out: SchedulerOutputs, virtual_engine: int) -> None:
        """Swap in, swap out, copy: before the model, and in this order. Mutates: the KV caches."""
        gpu, cpu = self.gpu_caches[virtual_engine], self.cpu_caches[virtual_engine]
        if cpu is not None:
            _copy_between(cpu, gpu, out.blocks_to_swap_in)
            _copy_between(gpu, cpu, out.blocks_to_swap_out)
        if out.blocks_to_copy:
            kernels.copy_blocks(gpu.layers, out.blocks_to_copy)

    def _sample(
        self, metadata: Sequence[SequenceGroupMetadata], model_input: ModelInput, hidden: Tensor
    ) -> SampledTokens:
        result = SampledTokens()
        ends = model_input.query_start_loc[1:]
        for i, group in enumerate(metadata):
            if group.params.prompt_logprobs is not None and group.is_prompt:
                self._score_prompt(group, hidden[model_input.query_start_loc[i] : ends[i]], result)
        ready = [(group, end - 1) for group, end in zip(metadata, ends, strict=True) if group.do_sample]
        if not ready:
            return result
        logits = self.model.logits(hidden[[row for _, row in ready]])
        params = [group.params for group, _ in ready]
        generators = [position_generator(g.params, _num_tokens(g), self.device) for g, _ in ready]
        token_ids = self.sampler(logits, params, generators)
        for i, ((group, _), token_id) in enumerate(zip(ready, token_ids.tolist(), strict=True)):
            result.sampled[group.request_id] = [token_id]
            if params[i].logprobs is not None:
                scores = token_logprobs(logits[i : i + 1], token_ids[i : i + 1], params[i].logprobs or 0)
                result.logprobs[group.request_id] = scores
        return result

    def _score_prompt(self, group: SequenceGroupMetadata, hidden: Tensor, result: SampledTokens) -> None:
        """Log-probabilities of the prompt tokens that this chunk predicts. Mutates: `result`."""
        (token_ids,) = group.token_ids.values()
        first = group.num_computed_tokens + 1
        following = token_ids[first : min(first + len(hidden), group.num_prompt_tokens)]
        if following:
            logits = self.model.logits(hidden[: len(following)])
            wanted = group.params.prompt_logprobs or 0
            scores = token_logprobs(logits, torch.tensor(following, device=self.device), wanted)
            result.prompt_logprobs[group.request_id] = (first, scores)


def _num_tokens(group: SequenceGroupMetadata) -> int:
    (token_ids,) = group.token_ids.values()
    return len(token_ids)


def _copy_between(source: KVCache, destination: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks of all layers. Mutates: `destination`."""
    if not pairs:
        return
    from_ids, to_ids = (list(ids) for ids in zip(*pairs, strict=True))
    for from_layer, to_layer in zip(source.layers, destination.layers, strict=True):
        for from_tensor, to_tensor in zip(from_layer, to_layer, strict=True):
            to_tensor[to_ids] = from_tensor[from_ids].to(to_tensor.device)
