"""Tasks of exercise 07: the batch that outlives a step, the tensors made of it, and who is sampled."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex07_checks import (
    check_batch,
    check_carried,
    check_map,
    check_prepare,
    check_sampled,
    check_small,
)

# -- other right answers ------------------------------------------------------------------------------------

OTHER_BATCH = """
ARRAYS = ("token_ids", "num_tokens", "num_prompt_tokens", "num_computed_tokens", "block_table", "num_blocks")

class Batch(InputBatch):
    def add(self, share):
        row = self.row_of[share.request_id] = len(self.row_of)
        for column, value in zip(
            (self.request_ids, self.params, self.adapters), (share.request_id, share.sampling_params, share.adapter)
        ):
            column.append(value)
        for name in ARRAYS:
            getattr(self, name)[row] = 0
        for position, token in enumerate(share.token_ids):
            self.token_ids[row][position] = token
            self.num_tokens[row] += 1
        self.num_prompt_tokens[row] = share.num_prompt_tokens
        self.num_computed_tokens[row] = share.num_computed_tokens

    def remove(self, request_id):
        if request_id not in self.row_of:
            return
        row = self.row_of.pop(request_id)
        for column in (self.request_ids, self.params, self.adapters):
            column[row] = column[-1]
            del column[-1]
        last = len(self.request_ids)
        for name in ARRAYS:
            getattr(self, name)[row] = getattr(self, name)[last]
        if row < last:
            self.row_of[self.request_ids[row]] = row

    def add_blocks(self, request_id, block_ids):
        row = self.row_of[request_id]
        for block_id in block_ids:
            self.block_table[row, self.num_blocks[row]] = block_id
            self.num_blocks[row] += 1
"""

OTHER_PREPARE = """
def prepare(batch, rows, counts):
    size = batch.block_size
    ends = batch.num_computed_tokens[rows] + counts
    all_positions = [np.arange(end - count, end) for end, count in zip(ends, counts)]
    tables = [batch.block_table[row][where // size] for row, where in zip(rows, all_positions)]
    tokens = [batch.token_ids[row][where] for row, where in zip(rows, all_positions)]
    positions = np.hstack(all_positions)
    return dict(
        positions=positions,
        token_ids=np.hstack(tokens),
        slots=np.hstack(tables) * size + positions % size,
        query_start_loc=np.append(0, np.cumsum(counts)),
        seq_lens=ends,
    )
"""

OTHER_SAMPLED = """
def who_samples(batch, rows, counts):
    indices, end = [], 0
    for row, count in zip(rows, counts):
        end += int(count)
        left = batch.num_tokens[row] - batch.num_computed_tokens[row]
        if left <= count:
            indices.append(end - 1)
    return indices
"""

OTHER_CARRIED = """
def carried(steps):
    totals = []
    for step in steps:
        total = 0
        for pair in step:
            for ids in pair:
                total += len(ids)
        totals.append(total)
    return totals

last_in_v0 = 134
last_in_v1 = 1
"""

TOTAL = "sum(len(tokens) + len(blocks) for tokens, blocks in step)"
DONE = "done = computed == batch.num_tokens[rows]"
SPREAD = "np.repeat(start - query_start_loc[:-1], counts)"

TASKS = [
    Task(
        id="07.1",
        kind="predict",
        title="a step by hand",
        points=10,
        answers={
            "positions": list,
            "slots": list,
            "query_start_loc": list,
            "seq_lens": list,
            "sampled": list,
        },
        check=check_small,
        hints=(
            "Begin with the positions: the first new token of a request has as many before it as are computed.",
            "The slot of position p is table[p // 4] * 4 + p % 4. query_start_loc begins with 0 and ends with the "
            "number of all tokens.",
            "b computes positions 4 to 8 and has two tokens left, so nothing is sampled for it; its seq_len is 9.",
        ),
        wrong=(
            WrongAnswer(
                "from zero",
                "positions start at 0 again",
                edits=(("[8, 4, 5, 6, 7, 8, 0,", "[0, 0, 1, 2, 3, 4, 0,"),),
            ),
            WrongAnswer(
                "no table",
                "a position is a slot",
                edits=(("[28, 36, 37, 38, 39, 16, 32, 33, 34, 35, 4, 5]", "list(positions)"),),
            ),
            WrongAnswer("lengths", "query_start_loc holds lengths", edits=(("[0, 1, 6, 12]", "[1, 5, 6]"),)),
            WrongAnswer("no end", "query_start_loc holds lengths", edits=(("[0, 1, 6, 12]", "[0, 1, 6]"),)),
            WrongAnswer(
                "new only", "attention sees only the new tokens", edits=(("[9, 9, 6]", "[1, 5, 6]"),)
            ),
            WrongAnswer(
                "all known",
                "an unfinished chunk sees what is not there",
                edits=(("[9, 9, 6]", "[9, 11, 6]"),),
            ),
            WrongAnswer(
                "everyone", "an unfinished chunk is sampled", edits=(('["a", "c"]', '["a", "b", "c"]'),)
            ),
            WrongAnswer("decodes", "only decodes are sampled", edits=(('["a", "c"]', '["a"]'),)),
        ),
        other=(
            "positions = (8, *range(4, 9), *range(6))\n"
            "slots = (7 * 4, *range(36, 40), 16, *range(32, 36), 4, 5)\n"
            "query_start_loc, seq_lens, sampled = (0, 1, 6, 12), (9, 9, 6), ('a', 'c')"
        ),
    ),
    Task(
        id="07.2",
        kind="build",
        title="the batch that outlives a step",
        points=25,
        answers={"Batch": type},
        check=check_batch,
        hints=(
            "A new request takes row len(self.request_ids). Whatever stood in that row is somebody else's, the count "
            "of blocks too.",
            "When a row falls free, copy every column of the last row into it, enter the new row into row_of, and "
            "shorten the three lists.",
            "Six arrays move: token_ids, num_tokens, num_prompt_tokens, num_computed_tokens, block_table, num_blocks. "
            "In add_blocks write from self.num_blocks[row] on, and then add len(block_ids) to it.",
        ),
        wrong=(
            *(
                WrongAnswer(
                    f"forgets {column}",
                    "the moved row forgets a column",
                    edits=((f"            self.{column}[row] = self.{column}[last]\n", ""),),
                )
                for column in (
                    "num_blocks",
                    "block_table",
                    "num_computed_tokens",
                    "num_prompt_tokens",
                    "token_ids",
                )
            ),
            WrongAnswer(
                "no new index",
                "the index names the old row",
                edits=(("            self.row_of[self.request_ids[last]] = row\n", ""),),
            ),
            WrongAnswer(
                "old table",
                "a reused row keeps the old table",
                edits=(("        self.num_blocks[row] = 0\n", ""),),
            ),
            WrongAnswer(
                "from zero",
                "positions start at 0 again",
                edits=(
                    (
                        "self.num_computed_tokens[row] = share.num_computed_tokens",
                        "self.num_computed_tokens[row] = 0",
                    ),
                ),
            ),
            WrongAnswer(
                "whole table",
                "blocks overwrite the table",
                edits=(
                    ("first = self.num_blocks[row]", "first = 0"),
                    ("self.num_blocks[row] += len(block_ids)", "self.num_blocks[row] = len(block_ids)"),
                ),
            ),
            WrongAnswer(
                "a hole",
                "a hole is left",
                edits=(
                    (
                        "            column[row] = column[last]\n            column.pop()\n",
                        "            pass\n",
                    ),
                ),
            ),
        ),
        other=OTHER_BATCH,
    ),
    Task(
        id="07.3",
        kind="build",
        title="the tensors of a step",
        points=25,
        answers={"prepare": Callable},
        check=check_prepare,
        hints=(
            "First say for every token of the step in which row its request lies: np.repeat(rows, counts).",
            "query_start_loc is a 0 and the cumsum of counts. np.arange over all tokens counts on across requests; "
            "what must be added for each request to get its positions?",
            "positions = np.arange(total) + np.repeat(start - query_start_loc[:-1], counts); block = "
            "batch.block_table[row_of_token, positions // size]; slot = block * size + positions % size.",
        ),
        wrong=(
            WrongAnswer(
                "from zero",
                "positions start at 0 again",
                edits=((SPREAD, "np.repeat(-query_start_loc[:-1], counts)"),),
            ),
            WrongAnswer(
                "slots by row",
                "slots by row",
                edits=(
                    (
                        "batch.block_table[row_of_token, positions // batch.block_size]",
                        "row_of_token * batch.block_table.shape[1] + positions // batch.block_size",
                    ),
                ),
            ),
            WrongAnswer(
                "no table",
                "a position is a slot",
                edits=(
                    (
                        "batch.block_table[row_of_token, positions // batch.block_size]",
                        "positions // batch.block_size",
                    ),
                ),
            ),
            WrongAnswer(
                "step order",
                "the order of the step is taken for the row",
                edits=(("np.repeat(rows, counts)", "np.repeat(np.arange(len(rows)), counts)"),),
            ),
            WrongAnswer(
                "head of the row",
                "tokens from the head of the row",
                edits=(
                    (
                        "batch.token_ids[row_of_token, positions]",
                        "batch.token_ids[row_of_token, positions - np.repeat(start, counts)]",
                    ),
                ),
            ),
            WrongAnswer(
                "new only",
                "attention sees only the new tokens",
                edits=(('"seq_lens": start + counts', '"seq_lens": counts'),),
            ),
            WrongAnswer(
                "all known",
                "an unfinished chunk sees what is not there",
                edits=(('"seq_lens": start + counts', '"seq_lens": batch.num_tokens[rows]'),),
            ),
            WrongAnswer(
                "no end",
                "query_start_loc holds lengths",
                edits=(('"query_start_loc": query_start_loc,', '"query_start_loc": query_start_loc[:-1],'),),
            ),
            WrongAnswer(
                "counts",
                "preparing counts",
                edits=(("    return {\n", "    batch.num_computed_tokens[rows] += counts\n    return {\n"),),
            ),
        ),
        other=OTHER_PREPARE,
    ),
    Task(
        id="07.4",
        kind="bug",
        title="who is sampled",
        points=20,
        answers={"who_samples": Callable},
        check=check_sampled,
        hints=(
            "Ada comes back after a preemption. Which of her tokens are known, and which are computed?",
            "Neither the prompt's length nor the number of tokens in this step decides. What comes after the last "
            "computed token?",
            "A token is sampled where nothing known is left to compute: computed == batch.num_tokens[rows].",
        ),
        wrong=(
            WrongAnswer("everyone", "an unfinished chunk is sampled", edits=((DONE, "done = counts > 0"),)),
            WrongAnswer(
                "single tokens",
                "one token means decode",
                edits=((DONE, "done = (counts == 1) | (computed == batch.num_tokens[rows])"),),
            ),
            WrongAnswer(
                "has output",
                "output means decode",
                edits=(
                    (
                        DONE,
                        "done = (batch.num_tokens[rows] > batch.num_prompt_tokens[rows]) | "
                        "(computed == batch.num_tokens[rows])",
                    ),
                ),
            ),
            WrongAnswer(
                "behind the prompt",
                "the prompt is taken for all there is",
                edits=(
                    (
                        DONE,
                        "done = (computed > batch.num_prompt_tokens[rows]) | (computed == batch.num_tokens[rows])",
                    ),
                ),
            ),
            WrongAnswer(
                "before the step",
                "the step's own tokens are left out",
                edits=((DONE, "done = batch.num_computed_tokens[rows] == batch.num_tokens[rows]"),),
            ),
        ),
        other=OTHER_SAMPLED,
    ),
    Task(
        id="07.5",
        kind="measure",
        title="what a step is told",
        points=10,
        answers={"carried": Callable, "last_in_v0": int, "last_in_v1": int},
        check=check_carried,
        hints=(
            "A step is a list of pairs, and both halves of a pair are lists.",
            "Add up the lengths of both halves over the pairs of a step; one number per step.",
            "[sum(len(tokens) + len(blocks) for tokens, blocks in step) for step in steps]; the last two numbers are "
            "read off the table.",
        ),
        wrong=(
            WrongAnswer(
                "tokens only",
                "block ids are left out",
                edits=((TOTAL, "sum(len(tokens) for tokens, blocks in step)"),),
            ),
            WrongAnswer("all", "V1 sends all, too", edits=(("last_in_v1 = 1", "last_in_v1 = 134"),)),
            WrongAnswer(
                "one each", "the sampled token is sent", edits=(("last_in_v1 = 1", "last_in_v1 = 5"),)
            ),
        ),
        other=OTHER_CARRIED,
    ),
    Task(
        id="07.6",
        kind="map",
        title="where it is in vLLM",
        points=10,
        answers={"makes_positions": dict, "makes_slots": dict},
        check=check_map,
        hints=(
            "The column role says it for V1's runners; V0's builder makes a first guess, with positions.",
            "Runner V2 lies in v1/worker/gpu/, runner V1 in v1/worker/gpu_model_runner.py and block_table.py there.",
            "The names differ by an underscore and a plural: _prepare_inputs and BlockTable are runner V1, "
            "prepare_inputs and BlockTables are runner V2. V0's slots come from a plain function.",
        ),
        wrong=(
            WrongAnswer(
                "V2 for V1",
                "one runner is taken for another",
                edits=(('"GPUModelRunner._prepare_inputs"', '"GPUModelRunner.prepare_inputs"'),),
            ),
            WrongAnswer(
                "tables for positions",
                "positions and slots come from one place",
                edits=(('"BlockTables.compute_slot_mappings"', '"GPUModelRunner.prepare_inputs"'),),
            ),
            WrongAnswer(
                "the states",
                "who keeps is who computes",
                edits=(('"GPUModelRunner._prepare_inputs"', '"GPUModelRunner._update_states"'),),
            ),
        ),
        other=(
            (
                '"ModelInputForGPUBuilder._compute_lens"',
                '"ModelInputForGPUBuilder._compute_for_prefix_cache_hit"',
            ),
            ('"BlockTable.compute_slot_mapping"', '"ComputeSlotMappingKernel.kernel"'),
        ),
    ),
]
