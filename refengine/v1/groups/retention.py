"""Which blocks of a sparse group are worth publishing: those that a later hit can end on.

A full-attention group publishes every block, since a hit needs all of them. A window group needs only the few
blocks before the end of a hit, a Mamba group just the one state there, and hits end only at multiples of the
alignment unit. What can never serve a hit need not be findable, and falls back to the free queue's front.

How many ends are provided for is the retention interval. Dense (None): every multiple of the alignment unit. 0: only
where it is known that somebody can resume, which is before the last token of the prompt (the same prompt sent
again) and at a shared-prefix boundary. n: there, and once every n tokens. vLLM's default is 0, so a prefix that two
prompts share can first be used by the third: the second one's lookup finds the boundary and pins it.
vLLM: V0 none; V1 `reachable_block_mask` in v1/core/single_type_kv_cache_manager.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from refengine.v1.request import Request


@dataclass(frozen=True)
class Retention:
    """Where hits can end, for all groups of one model alike."""

    alignment: int  # tokens
    interval: int | None = None  # tokens, a multiple of the alignment; None: dense
    drop_last: bool = False  # lookups give their last block back, so they must find one more

    def known_ends(self, request: Request, block_size: int) -> set[int]:
        """Lengths in tokens at which a later request is known to be able to resume this one's prefix."""
        unit, prompt = self.alignment, request.num_prompt_tokens
        ends = {prompt - 1}  # the same prompt again leaves its last token to compute
        if self.drop_last:
            # What is given back is a whole block, also for a longer prompt that could use this one to its end.
            ends = {max(end // unit * unit - unit, 0) for end in (prompt - 1, prompt)}
        if request.shared_prefix_boundary:
            ends.add(request.shared_prefix_boundary)
            if self.drop_last:  # whoever differs right behind the boundary has no block there to give back
                ends.add(request.shared_prefix_boundary - block_size)
        return {end // unit * unit for end in ends}

    def reachable(
        self, request: Request, first: int, last: int, block_size: int, need: int, peek: int = 0
    ) -> list[int]:
        """Positions from `first` up to `last` that are among the `need` blocks before the end of some hit.

        `peek`: the lookup reads so many blocks beyond the end, and gives them back.
        """
        segment = (self.alignment if self.interval is None else self.interval) // block_size
        if 0 < segment <= need:
            return list(range(first, last))
        keep: set[int] = set()
        if segment:
            keep = {i for i in range(max(first, peek), last) if (i - peek) % segment >= segment - need}
        if self.interval is not None:
            for tokens in self.known_ends(request, block_size):
                end = tokens // block_size + peek
                keep.update(range(max(first, end - need), min(last, end)))
        return sorted(keep)
