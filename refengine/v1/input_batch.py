"""The persistent batch: every running request keeps its row from step to step.

Building a batch from nothing costs time for every token of every request in every step. Here a decode step
only adds one token and now and then one block to a row. A row that falls free is filled with the last one, so
that rows `0 .. num_requests - 1` are always the occupied ones.
vLLM: V0 builds anew in worker/model_runner.py ModelInputForGPUBuilder; V1 v1/worker/gpu_input_batch.py InputBatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refengine.errors import ConfigError, IntegrityError
from refengine.hashing import Adapter
from refengine.sampling import SamplingParams
from refengine.v1.groups.base import num_blocks_for
from refengine.v1.scheduler_output import ScheduledRequest

MOST_TOKENS = 2**34  # 128 GiB of token ids: beyond it, a number was mistyped


class InputBatch:
    """Columns of `max_num_seqs` rows. `np.zeros` takes memory only for rows that are used.

    `block_table` and `num_blocks` are the first group's, for most models the only one's; `block_tables` and
    `block_counts` are the same memory with all groups.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        """`block_size`: tokens, the same in all groups. Raises: ConfigError for a batch that can only be a slip."""
        if max_num_seqs * max_model_len > MOST_TOKENS:
            raise ConfigError(
                f"max_num_seqs {max_num_seqs} with {max_model_len} tokens each is more than can be kept"
            )
        self.block_size = block_size
        self.request_ids: list[str] = []  # by row
        self.row_of: dict[str, int] = {}
        self.params: list[SamplingParams] = []  # by row
        self.adapters: list[Adapter | None] = []  # by row
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)  # known tokens of each row
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        most_blocks = num_blocks_for(max_model_len, block_size)
        self.block_tables = np.zeros((max_num_seqs, num_groups, most_blocks), np.int64)
        self.block_counts = np.zeros((max_num_seqs, num_groups), np.int64)
        self.block_table, self.num_blocks = self.block_tables[:, 0], self.block_counts[:, 0]
        self._columns = (
            self.token_ids,
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_computed_tokens,
            self.block_tables,
            self.block_counts,
        )

    def add(self, share: ScheduledRequest) -> None:
        """Gives a new or resumed request the next row. Mutates: that row. Raises: IntegrityError if it has one."""
        if share.request_id in self.row_of or share.sampling_params is None:
            raise IntegrityError(f"request {share.request_id!r} is not new to the batch")
        row = len(self.request_ids)
        self.row_of[share.request_id] = row
        self.request_ids.append(share.request_id)
        self.params.append(share.sampling_params)
        self.adapters.append(share.adapter)
        self.token_ids[row, : len(share.token_ids)] = share.token_ids
        self.num_tokens[row] = len(share.token_ids)
        self.num_prompt_tokens[row] = share.num_prompt_tokens
        self.num_computed_tokens[row] = share.num_computed_tokens
        self.block_counts[row] = 0

    def remove(self, request_id: str) -> None:
        """Frees a row and moves the last one into it. A request without a row is fine. Mutates: both rows."""
        row = self.row_of.pop(request_id, None)
        if row is None:
            return
        last = len(self.request_ids) - 1
        if row != last:
            for column in self._columns:
                column[row] = column[last]
            self.request_ids[row], self.params[row] = self.request_ids[last], self.params[last]
            self.adapters[row] = self.adapters[last]
            self.row_of[self.request_ids[row]] = row
        del self.request_ids[last], self.params[last], self.adapters[last]

    def add_blocks(self, request_id: str, *block_ids: Sequence[int]) -> None:
        """Appends blocks to a request's tables, one list for each group. Mutates: its row."""
        row = self.row_of[request_id]
        for group, ids in enumerate(block_ids):
            start = self.block_counts[row, group]
            self.block_tables[row, group, start : start + len(ids)] = ids
            self.block_counts[row, group] += len(ids)

    def add_token(self, row: int, token_id: int) -> None:
        """Appends a sampled token. Mutates: the row."""
        self.token_ids[row, self.num_tokens[row]] = token_id
        self.num_tokens[row] += 1
