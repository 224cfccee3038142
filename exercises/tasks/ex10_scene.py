"""The bench for chapter and exercise 10: a recorded step of two decodes, the house's kernel in pieces, who reads what.

`on_kernels` puts a reader's kernels under the engine: decodes run on them in the interpreter, prompts and chunks on the
reference.
"""

from __future__ import annotations

import inspect
import textwrap
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from exercises.tasks.ex07_scene import Desk
from exercises.tasks.ex08_scene import Watch, make_pages
from kernels import backend_for, cuda
from kernels.cuda.decode_plain import decode_plain_kernel
from kernels.interpreter import interpret, is_interpreting
from refengine.llm import LLM
from refengine.sampling import SamplingParams
from refengine.viz import Table

THREADS = 64  # of a block, in the decode of the exercise; also the keys of a tile


# -- one step, recorded --------------------------------------------------------------------------------------


def decoding_step() -> tuple[Watch, Desk]:
    """A step in which Ada and Bob decode, watched. Bob's first two blocks are Ada's."""
    watch = Watch()
    desk = Desk(parts={"attention": watch.backend})
    desk.add("ada", range(40, 50), 4)
    desk.step()
    desk.add("bob", [*range(40, 48), 60], 4)
    desk.step()
    watch.calls.clear()
    desk.step()
    return watch, desk


def without(caches: tuple[Tensor, ...], slots: Tensor) -> list[Tensor]:
    """Copies of caches with nothing, NaN, in these slots; -1 is none."""
    copies = [cache.clone() for cache in caches]
    for copy in copies:
        copy.flatten(0, 1)[slots[slots >= 0]] = torch.nan
    return copies


# -- the house's kernel --------------------------------------------------------------------------------------


def piece(first: str, last: str) -> str:
    """Lines of the plain decode kernel: from the one that starts with `first` to the next one that starts with `last`.

    Raises: ValueError if there are no such lines.
    """
    lines = inspect.getsource(decode_plain_kernel).split("\n")
    found = [i for i, line in enumerate(lines) if line.strip().startswith(first)]
    for start in found[:1]:
        for end in range(start, len(lines)):
            if lines[end].strip().startswith(last):
                return textwrap.dedent("\n".join(lines[start : end + 1]))
    raise ValueError(f"the plain decode has no lines from {first!r} to {last!r}")


def key_sectors(kernel: str, group: int) -> int:
    """Sectors of the key cache that one of the house's decodes reads: 20 tokens, 2 KV heads of 64 numbers, float32."""
    pages = make_pages([(1, 20)], 8, 2 * group, 2, 64)
    tensors = (pages.query, pages.key_cache, pages.value_cache, pages.block_tables, pages.seq_lens)
    with interpret() as report:
        cuda.paged_attention_decode(*tensors, pages.scale, kernel=kernel)  # type: ignore[arg-type]
    return report.total("global", "read", "key_cache").sectors


def group_table() -> Table:
    """Sectors of keys by the number of query heads that share a KV head, for the plain and the split kernel."""
    least = 20 * 2 * 64 * 4 // 32
    rows = [(group, least, *(key_sectors(name, group) for name in ("plain", "split"))) for group in (1, 2, 4)]
    return Table(("group", "least", "plain", "split"), rows)


def engine_run(engine: str, backend: str) -> tuple[str, list[str]]:
    """The tiny model after a prompt of one token. Returns: what it says, the kernels that ran in the interpreter."""
    options: dict[str, Any] = {} if engine == "v1" else {"enable_chunked_prefill": False}
    llm = LLM("tiny", engine=engine, backend=backend, block_size=8, num_blocks=12, **options)
    with interpret() as report:
        (output,) = llm.generate(["Ada"], SamplingParams(max_tokens=4, ignore_eos=True))
    return output.text, list(dict.fromkeys(record.kernel for record in report.lines))


# -- an engine on a reader's kernels -------------------------------------------------------------------------


def on_kernels(decode: Any, write: Any = None) -> SimpleNamespace:
    """What goes into `parts={"attention": ...}`: decodes on a reader's kernel, and writes too if `write` is given.

    decode: launched as `[(num_seqs, num_heads), THREADS]` with (out, query, key_cache, value_cache, block_tables,
        seq_lens, scale). write: `[num_tokens, 32]` with (key, value, key_cache, value_cache, slot_mapping).
    """
    reference: Any = backend_for("cpu", "reference")

    def launch(kernel: Any, grid: Any, threads: int, *arguments: Any) -> None:
        if is_interpreting():
            kernel[grid, threads](*arguments)
            return
        with interpret():
            kernel[grid, threads](*arguments)

    def reshape_and_cache(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        arguments = (key.contiguous(), value.contiguous(), key_cache, value_cache, slot_mapping)
        launch(write, len(key), 32, *arguments)

    def paged_attention_decode(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        scale: float,
        sliding_window: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if sliding_window is not None:
            raise ValueError("this decode knows no sliding window; chapter 12 is about them")
        result = torch.full(query.shape, torch.nan, dtype=query.dtype) if out is None else out
        tensors = (result, query.contiguous(), key_cache, value_cache, block_tables, seq_lens)
        launch(decode, (len(query), query.shape[1]), THREADS, *tensors, scale)
        return result

    def paged_attention(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        scale: float,
        sliding_window: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The reference for all, then the kernel for the rows of sequences with one new token."""
        caches, starts = (key_cache, value_cache), query_start_loc.tolist()
        result: Tensor = reference.paged_attention(
            query, *caches, block_tables, query_start_loc, seq_lens, scale, sliding_window, out
        )
        single = [i for i, (first, stop) in enumerate(pairwise(starts)) if stop - first == 1]
        if single:
            rows = [starts[i] for i in single]
            result[rows] = paged_attention_decode(
                query[rows], *caches, block_tables[single], seq_lens[single], scale, sliding_window
            )
        return result

    return SimpleNamespace(
        __name__="decode in the interpreter",
        reshape_and_cache=reshape_and_cache if write is not None else reference.reshape_and_cache,
        paged_attention=paged_attention,
        paged_attention_decode=paged_attention_decode,
    )
