"""A shadow of the KV cache: for every slot, of which prefix the keys and values in it truly are.

An engine can reuse a wrong block and still print a plausible token, so equal outputs prove little. The shadow
knows better. K and V at a position are a function of all tokens up to it, so "what is in this slot" has an exact
answer: the last prefix that was written there. The shadow gets each step as the model gets it, after all
decisions were made, and says where a read would find something else than the reader's own prefix.

It knows no engine. Whoever can describe a step as a `StepInput` can be judged: what the model is given, who
holds which block by the word of its manager, and which blocks can be found under which hash. What the tokens of
a request *ought* to be it is told by the test, never by the engine.

One shadow watches one cache group. What an attention layer reads is decided in `_visible` alone, where a window or
a chunk narrows it. A recurrent state is read and written whole: `ShadowStates` has the rule for it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "input",  # a token, position or length that is not the request's
    "write",  # into a block that the writer does not hold
    "race",  # two requests write one slot in one step
    "overwrite",  # into a block that somebody else held already
    "padding",  # a row of no request that writes
    "unwritten",  # read of a slot that nobody ever wrote
    "read",  # read of a slot that holds another prefix
    "promise",  # a block that can be found, and does not hold what its hash says
    "collision",  # one hash for two prefixes
    "table",  # the model is given another block table than the manager's
    "limit",  # more tokens or requests in a step than were allowed
]
Identity = Hashable  # what sets requests with equal tokens apart: adapter, salt
Prefix = int  # one tokens-and-identity prefix, as interned in `Prefixes`


@dataclass(frozen=True)
class SequenceInput:
    """One request in one step, as the model gets it. Position i of the chunk is in row i of each list."""

    request_id: str
    token_ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]  # where each token's K/V go; negative: nowhere
    block_table: Sequence[int]  # what attention reads through
    seq_len: int  # tokens that attention may see, this chunk included


@dataclass(frozen=True)
class StepInput:
    """One step of an engine. All its writes happen before all its reads, as in every layer of the model."""

    sequences: Sequence[SequenceInput]
    held: Mapping[str, Sequence[int]]  # by request, the blocks that it holds in this step
    held_before: Mapping[str, Sequence[int]]  # the same before the step was decided
    padding_slots: Sequence[int] = ()  # of rows that belong to no sequence


@dataclass(frozen=True)
class Violation:
    """One thing that must not happen. `request_id` None: no request did it."""

    kind: Kind
    request_id: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.request_id or 'the cache'} {self.text}"


class Prefixes:
    """A number for every prefix, so that a slot remembers a prefix in one word. Prefixes only ever get more."""

    def __init__(self) -> None:
        self._number: dict[tuple[Identity, Prefix | None, int], Prefix] = {}
        self._step: list[tuple[Identity, Prefix | None, int]] = []

    def extend(self, identity: Identity, parent: Prefix | None, token_id: int) -> Prefix:
        """The prefix that is `parent` and one more token. `parent` None: it is the first one."""
        step = (identity, parent, token_id)
        number = self._number.setdefault(step, len(self._step))
        if number == len(self._step):
            self._step.append(step)
        return number

    def tail(self, prefix: Prefix, length: int) -> list[Prefix]:
        """The last `length` prefixes on the way to this one, itself included, shortest first."""
        chain: list[Prefix] = []
        at: Prefix | None = prefix
        while at is not None and len(chain) < length:
            chain.append(at)
            at = self._step[at][1]
        return chain[::-1]

    def show(self, prefix: Prefix | None) -> str:
        """In words, for a report."""
        if prefix is None:
            return "nothing"
        steps = [self._step[number] for number in self.tail(prefix, len(self._step))]
        return f"{[token_id for _, _, token_id in steps]} of {steps[0][0]}"


class ShadowKV:
    """What every slot holds, and what every request and every hash ought to find."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        may_rewrite: bool = False,
        window: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """`may_rewrite`: a block that others hold may be written again, with what it holds already.

        vLLM's V0 does so when a whole prompt is cached: it recomputes the last block and stores it once more.
        `window`, `chunk`: tokens, of the layers in this group, if they do not see everything before them.
        """
        self.num_blocks, self.block_size, self.may_rewrite = num_blocks, block_size, may_rewrite
        self.window, self.chunk = window, chunk
        self.prefixes = Prefixes()
        self.written: dict[int, Prefix] = {}  # by slot
        self.shared_in_step: set[str] = (
            set()
        )  # requests that read, in the last step, what another one just wrote
        self._identity: dict[str, Identity] = {}
        self._tokens: dict[str, list[int]] = {}
        self._path: dict[str, list[Prefix]] = {}  # by request: the prefix up to each of its positions
        self._promised: dict[Hashable, Prefix] = {}  # by hash
        self._num_learned: dict[str, int] = {}

    # -- the truth, from the test ---------------------------------------------------------------------------

    def begin(self, request_id: str, identity: Identity, token_ids: Sequence[int]) -> None:
        """A request with this prompt. Mutates: the truth."""
        self._identity[request_id], self._tokens[request_id], self._path[request_id] = identity, [], []
        self.append(request_id, token_ids)

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tokens that were sampled for it. Mutates: the truth."""
        path = self._path[request_id]
        for token_id in token_ids:
            parent = path[-1] if path else None
            path.append(self.prefixes.extend(self._identity[request_id], parent, token_id))
            self._tokens[request_id].append(token_id)

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of a request so far."""
        return self._tokens[request_id]

    def learn(self, request_id: str, hashes: Sequence[Hashable]) -> list[Violation]:
        """By which hashes the engine calls the full blocks of this request, first block first.

        Mutates: what is promised. Returns: hashes that already stood for another prefix.
        """
        violations, path = [], self._path[request_id]
        for i in range(self._num_learned.get(request_id, 0), len(hashes)):
            prefix = path[(i + 1) * self.block_size - 1]
            known = self._promised.setdefault(hashes[i], prefix)
            if known != prefix:
                text = f"gives {self.prefixes.show(prefix)} the hash of {self.prefixes.show(known)}"
                violations.append(Violation("collision", request_id, text))
        self._num_learned[request_id] = len(hashes)
        return violations

    # -- judging --------------------------------------------------------------------------------------------

    def run(self, step: StepInput) -> list[Violation]:
        """Performs a step. Mutates: what is written. Returns: everything that is wrong with it."""
        violations: list[Violation] = []
        writers: dict[int, str] = {}
        for sequence in step.sequences:
            violations += self._check_input(sequence)
        for sequence in step.sequences:
            violations += self._write(sequence, step, writers)
        violations += [
            Violation("padding", None, f"writes slot {slot} for a row of no request")
            for slot in step.padding_slots
            if slot >= 0
        ]
        self.shared_in_step.clear()
        for sequence in step.sequences:
            violations += self._read(sequence, writers)
        return violations

    def spoil(self, slots: Collection[int]) -> None:
        """A step failed half-way: these slots hold anything now. Mutates: what is written."""
        for slot in slots:
            self.written.pop(slot, None)

    def check_findable(self, findable: Mapping[int, Hashable]) -> list[Violation]:
        """Whether each findable block (id -> hash) holds all that its hash promises. For between two steps."""
        violations = []
        for block_id, block_hash in findable.items():
            promised = self._promised.get(block_hash)
            if promised is None:
                violations.append(
                    Violation("promise", None, f"finds block {block_id} by a hash of no request")
                )
                continue
            for offset, prefix in enumerate(self.prefixes.tail(promised, self.block_size)):
                if self.written.get(block_id * self.block_size + offset) != prefix:
                    text = (
                        f"promises {self.prefixes.show(promised)} in block {block_id}: offset {offset} holds "
                    )
                    text += self.prefixes.show(self.written.get(block_id * self.block_size + offset))
                    violations.append(Violation("promise", None, text))
                    break
        return violations

    def _check_input(self, sequence: SequenceInput) -> Iterator[Violation]:
        """The chunk is a piece of the request's own tokens, in place, and ends where attention ends."""
        request_id, tokens = sequence.request_id, self._tokens[sequence.request_id]
        first = sequence.seq_len - len(sequence.positions)
        if list(sequence.positions) != list(range(first, sequence.seq_len)):
            text = f"has positions {list(sequence.positions)}, but attention sees {sequence.seq_len} tokens"
            yield Violation("input", request_id, text)
        for position, token_id in zip(sequence.positions, sequence.token_ids, strict=True):
            if not 0 <= position < len(tokens) or tokens[position] != token_id:
                text = f"computes token {token_id} at position {position}, but its tokens are {tokens}"
                yield Violation("input", request_id, text)

    def _write(
        self, sequence: SequenceInput, step: StepInput, writers: dict[int, str]
    ) -> Iterator[Violation]:
        """Mutates: what is written, `writers`."""
        writer, path = sequence.request_id, self._path[sequence.request_id]
        for position, slot in zip(sequence.positions, sequence.slots, strict=True):
            if slot < 0:
                continue
            block_id = slot // self.block_size
            prefix = path[position] if position < len(path) else None
            if block_id >= self.num_blocks or block_id not in step.held.get(writer, ()):
                yield Violation(
                    "write", writer, f"writes block {block_id}, holding {list(step.held.get(writer, ()))}"
                )
            if writers.setdefault(slot, writer) != writer:
                yield Violation("race", writer, f"writes slot {slot} in the same step as {writers[slot]}")
            is_same = self.may_rewrite and self.written.get(slot) == prefix
            if not is_same and (owners := _others(writer, block_id, step)):
                yield Violation("overwrite", writer, f"writes block {block_id}, which {owners} held before")
            if prefix is not None:
                self.written[slot] = prefix

    def _read(self, sequence: SequenceInput, writers: Mapping[int, str]) -> Iterator[Violation]:
        """Mutates: `shared_in_step`."""
        reader, path, block_size = sequence.request_id, self._path[sequence.request_id], self.block_size
        for position in self._visible(sequence):
            if position // block_size >= len(sequence.block_table):
                yield Violation("read", reader, f"reads position {position}, beyond its block table")
                return
            slot = sequence.block_table[position // block_size] * block_size + position % block_size
            found = self.written.get(slot)
            if writers.get(slot, reader) != reader:
                self.shared_in_step.add(reader)
            if found is None:
                yield Violation(
                    "unwritten", reader, f"reads position {position} in slot {slot}, which is blank"
                )
            elif position >= len(path) or found != path[position]:
                text = f"reads position {position} in slot {slot}, which holds {self.prefixes.show(found)}"
                yield Violation("read", reader, text)

    def _visible(self, sequence: SequenceInput) -> range:
        """Positions that some query of the chunk sees: with full attention, all up to the last one."""
        first = sequence.seq_len - len(sequence.positions)  # the query that sees furthest back
        begin = 0 if self.window is None else max(first - self.window + 1, 0)
        begin = begin if self.chunk is None else first // self.chunk * self.chunk
        return range(begin, sequence.seq_len)


class ShadowStates(ShadowKV):
    """The same for a group of recurrent states: what every block holds is the state after some prefix.

    Here `slots` of a `SequenceInput` are block ids: the block to start from (negative: from nothing), and the block to
    leave the new state in. All reads of a step come before all writes: a state is done only when its step is.
    """

    def run(self, step: StepInput) -> list[Violation]:
        violations: list[Violation] = []
        writers: dict[int, str] = {}
        for sequence in step.sequences:
            violations += self._check_input(sequence)
        for sequence in step.sequences:
            violations += self._read_state(sequence, step)
        for sequence in step.sequences:
            violations += self._write_state(sequence, step, writers)
        return violations

    def check_findable(self, findable: Mapping[int, Hashable]) -> list[Violation]:
        violations = []
        for block_id, block_hash in findable.items():
            promised = self._promised.get(block_hash)
            if promised is None or self.written.get(block_id) != promised:
                held = self.prefixes.show(self.written.get(block_id))
                text = f"promises the state after {self.prefixes.show(promised)} in block {block_id}: it is of {held}"
                violations.append(Violation("promise", None, text))
        return violations

    def _read_state(self, sequence: SequenceInput, step: StepInput) -> Iterator[Violation]:
        reader, path = sequence.request_id, self._path[sequence.request_id]
        first, block_id = sequence.seq_len - len(sequence.positions), sequence.slots[0]
        if first == 0 and block_id < 0:
            return
        if block_id not in step.held.get(reader, ()):  # somebody else may write it in this very step
            yield Violation("read", reader, f"goes on from block {block_id}, holding {step.held.get(reader)}")
        found = self.written.get(block_id)
        if found is None:
            yield Violation(
                "unwritten", reader, f"goes on after {first} tokens from block {block_id}: no state"
            )
        elif not 0 < first <= len(path) or found != path[first - 1]:
            text = f"goes on after {first} tokens from block {block_id}, the state of {self.prefixes.show(found)}"
            yield Violation("read", reader, text)

    def _write_state(
        self, sequence: SequenceInput, step: StepInput, writers: dict[int, str]
    ) -> Iterator[Violation]:
        """Mutates: what is written, `writers`."""
        writer, path, block_id = sequence.request_id, self._path[sequence.request_id], sequence.slots[1]
        if block_id not in step.held.get(writer, ()):
            yield Violation("write", writer, f"writes block {block_id}, holding {step.held.get(writer)}")
        if writers.setdefault(block_id, writer) != writer:
            yield Violation(
                "race", writer, f"writes block {block_id} in the same step as {writers[block_id]}"
            )
        if owners := _others(writer, block_id, step):
            yield Violation("overwrite", writer, f"writes block {block_id}, which {owners} held before")
        if sequence.seq_len <= len(path):
            self.written[block_id] = path[sequence.seq_len - 1]


def _others(writer: str, block_id: int, step: StepInput) -> Collection[str]:
    """Requests that held this block before the step and still do, besides the writer."""
    return [
        request_id
        for request_id, blocks in step.held_before.items()
        if request_id != writer and block_id in blocks and block_id in step.held.get(request_id, ())
    ]
