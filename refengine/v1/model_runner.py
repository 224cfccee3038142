"""From a scheduling decision to tensors, through the network, to sampled tokens.

The runner starts each request at the position the scheduler names. It has no notion of a prefix hit: skipped
tokens are simply never in the input, and their K/V are found because the block table points at them.
A model with several cache groups has a table for each of them, and all the rest in common.
vLLM: V0 worker/model_runner.py, where `_compute_for_prefix_cache_hit` does the skipping; V1
v1/worker/gpu_model_runner.py GPUModelRunner (`_update_states`, `_prepare_inputs`) and v1/worker/gpu/.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import Backend
from refengine.attention import AttentionMetadata, PagedAttention, choose_backend
from refengine.cuda_graphs import GraphedDecode, GraphLimits, LayerTable, graphs_for
from refengine.gpu import new_stream, on_stream, to_device
from refengine.kv_cache import KVCache
from refengine.model.decoder import Adapt, Attend, Decoder
from refengine.model.linear_attention import Recur
from refengine.model.lora import LoadedAdapters
from refengine.outputs import SampledTokens
from refengine.recurrence import PagedRecurrence
from refengine.sampling import Sampler, position_generator, sample, token_logprobs
from refengine.trace.observer import Observer
from refengine.v1.groups.spec import MAMBA
from refengine.v1.input_batch import InputBatch
from refengine.v1.layer_groups import layer_groups
from refengine.v1.scheduler_output import ScheduledRequest, SchedulerOutput


@dataclass(frozen=True)
class ModelInput:
    """One step as tensors, made on the host. Tokens of all requests lie one after another, in the scheduler's order."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: AttentionMetadata  # of the first cache group, for most models the only one
    adapt: Adapt | None = None  # None: no request of the step has an adapter
    other_groups: tuple[AttentionMetadata, ...] = ()  # the same for further cache groups

    @property
    def groups(self) -> tuple[AttentionMetadata, ...]:
        return (self.metadata, *self.other_groups)

    def to(self, device: torch.device) -> ModelInput:
        """The same, there. Adapters are there already."""
        first, *others = (group.to(device) for group in self.groups)
        token_ids, positions = to_device(self.token_ids, device), to_device(self.positions, device)
        return ModelInput(token_ids, positions, first, self.adapt, tuple(others))


class ModelRunner:
    """Owns the network, the KV tensors and the persistent batch."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        batch: InputBatch,
        *,
        backend: str | Backend | None = None,
        graph_limits: GraphLimits | None = None,
        sampler: Sampler = sample,
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.adapters = LoadedAdapters(model)
        self.batch = batch
        self.groups = layer_groups(model.config, kv_cache.block_size)
        self.device = model.embed_tokens.weight.device
        self.backend = choose_backend(self.device, backend)
        self.stream = new_stream(self.device)
        self.graphs = self._make_graphs(graph_limits)
        self.sampler = sampler
        self.observer = observer

    def _make_graphs(self, limits: GraphLimits | None) -> GraphedDecode | None:
        """Graphs for decode steps, if all layers attend: a recurrence reads from the device where pieces end."""
        if any(group.spec.kind == MAMBA for group in self.groups):
            return None
        table_of = {
            layer: LayerTable(i, group.spec.window)
            for i, group in enumerate(self.groups)
            for layer in group.layers
        }
        layers = [table_of[layer] for layer in sorted(table_of)]
        return graphs_for(self.model, self.kv_cache, self.backend, layers, limits, self.stream)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """Runs one step. Mutates: the batch, the KV cache."""
        self._update_states(output)
        if not output.scheduled:
            return SampledTokens()
        with on_stream(self.stream):
            hidden = self._forward(self._prepare_inputs(output.scheduled))
            return self._sample(output.scheduled, hidden)

    def _forward(self, model_input: ModelInput) -> Tensor:
        """The hidden states of the step, from a graph if there is one for it. Mutates: the KV cache."""
        if self.graphs is not None and model_input.adapt is None:
            hidden = self.graphs.run(model_input.token_ids, model_input.positions, model_input.groups)
            if hidden is not None:
                return hidden
        there = model_input.to(self.device)
        attend, recur = self._mixers(there)
        return self.model(there.token_ids, there.positions, attend, there.adapt, recur)  # type: ignore[no-any-return]

    def _mixers(self, model_input: ModelInput) -> tuple[Attend, Recur | None]:
        """How the layers reach their past: attention by layer, with its group's tables, and recurrence."""
        attends: dict[int, Attend] = {}
        recur: Recur | None = None
        for group, its_metadata in zip(self.groups, model_input.groups, strict=True):
            if group.spec.kind == MAMBA:
                recur = PagedRecurrence(self.kv_cache, its_metadata)
            else:
                attend = PagedAttention(
                    self.kv_cache, its_metadata, self.backend, group.spec.window, group.layers[0]
                )
                attends |= dict.fromkeys(group.layers, attend)
        return lambda layer, *qkv: attends[layer](layer, *qkv), recur

    def _update_states(self, output: SchedulerOutput) -> None:
        """Brings the batch up to what the scheduler knows: rows leave, rows arrive, tables grow."""
        for request_id in output.finished_ids | output.preempted_ids:
            self.batch.remove(request_id)
        for share in output.scheduled:
            if share.kind != "running":
                self.batch.add(share)
            if share.block_ids is not None:
                self.batch.add_blocks(share.request_id, *share.block_ids)

    def _prepare_inputs(self, scheduled: list[ScheduledRequest]) -> ModelInput:
        """Token ids, positions, slots and attention metadata of the step, without a loop over tokens."""
        batch, block_size = self.batch, self.batch.block_size
        rows = np.array([batch.row_of[share.request_id] for share in scheduled])
        counts = np.array([share.num_tokens for share in scheduled])
        first = batch.num_computed_tokens[rows]  # the scheduler's word, brought along in each row
        query_start_loc = np.concatenate(([0], counts.cumsum()))
        row_of_token = np.repeat(rows, counts)  # [num_tokens]
        positions = np.arange(query_start_loc[-1]) + np.repeat(first - query_start_loc[:-1], counts)
        starts, lengths = torch.from_numpy(query_start_loc), torch.from_numpy(first + counts)
        groups = []
        for group in range(batch.block_tables.shape[1]):
            table = batch.block_tables[:, group]
            slots = table[row_of_token, positions // block_size] * block_size + positions % block_size
            width = batch.block_counts[rows, group].max()
            tables = torch.from_numpy(table[rows, :width])
            groups.append(AttentionMetadata(torch.from_numpy(slots), tables, starts, lengths))
        batch.num_computed_tokens[rows] += counts
        if self.observer is not None:
            for share, start in zip(scheduled, first.tolist(), strict=True):
                self.observer.mark("run", share.request_id, start=start, num_tokens=share.num_tokens)
        return ModelInput(
            torch.from_numpy(batch.token_ids[row_of_token, positions]),
            torch.from_numpy(positions),
            groups[0],
            self.adapters.for_requests([batch.adapters[row] for row in rows], counts),
            tuple(groups[1:]),
        )

    def _sample(self, scheduled: list[ScheduledRequest], hidden: Tensor) -> SampledTokens:
        """One token for each request that has computed all it has. Mutates: their rows."""
        output = SampledTokens()
        ends = np.cumsum([share.num_tokens for share in scheduled])
        ready: list[tuple[str, int, int]] = []  # request, its row, the index of its last token in `hidden`
        for share, end in zip(scheduled, ends.tolist(), strict=True):
            row = self.batch.row_of[share.request_id]
            if self.batch.params[row].prompt_logprobs is not None:
                self._score_prompt(share, row, hidden[end - share.num_tokens : end], output)
            if self.batch.num_computed_tokens[row] == self.batch.num_tokens[row]:
                ready.append((share.request_id, row, end - 1))
        if not ready:
            return output
        logits = self.model.logits(hidden[[index for _, _, index in ready]])  # [num_ready, vocab_size]
        params = [self.batch.params[row] for _, row, _ in ready]
        generators = [
            position_generator(self.batch.params[row], int(self.batch.num_tokens[row]), self.device)
            for _, row, _ in ready
        ]
        token_ids = self.sampler(logits, params, generators)
        for i, ((request_id, row, _), token_id) in enumerate(zip(ready, token_ids.tolist(), strict=True)):
            self.batch.add_token(row, token_id)
            output.sampled[request_id] = [token_id]
            wanted = params[i].logprobs
            if wanted is not None:
                output.logprobs[request_id] = token_logprobs(logits[i : i + 1], token_ids[i : i + 1], wanted)
        return output

    def _score_prompt(self, share: ScheduledRequest, row: int, hidden: Tensor, output: SampledTokens) -> None:
        """Log-probabilities of the prompt tokens that this chunk predicts. Mutates: `output`."""
        end = int(self.batch.num_computed_tokens[row])
        first = end - share.num_tokens + 1  # the chunk's first token predicts the one after it
        following = self.batch.token_ids[row, first : min(end + 1, self.batch.num_prompt_tokens[row])]
        if len(following):
            logits = self.model.logits(hidden[: len(following)])
            wanted = self.batch.params[row].prompt_logprobs or 0
            scores = token_logprobs(logits, self._tensor(following), wanted)
            output.prompt_logprobs[share.request_id] = (first, scores)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(array), self.device)
