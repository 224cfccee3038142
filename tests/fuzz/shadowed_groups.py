"""V1's scheduler and KV cache manager with several cache groups, without a model: one shadow per group.

What a model runner would do with a step is done here by `_inputs`: it keeps tables of its own that only ever grow, as
the persistent batch does, and takes slots and states out of them by the rules in `refengine/v1/groups/spec.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from refengine.config import EngineConfig
from refengine.hashing import BlockHasher
from refengine.sampling import SamplingParams
from refengine.v1.block_pool import block_key, group_of
from refengine.v1.groups.spec import MAMBA, GroupSpec, hash_block_size, state_position
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request, RequestStatus
from refengine.v1.scheduler import Scheduler
from refengine.v1.scheduler_output import ScheduledRequest, SchedulerOutput
from tests.fuzz.oracle import SequenceInput, ShadowKV, ShadowStates, StepInput, Violation
from tests.fuzz.tally import Tally

Held = dict[str, list[int]]


class ShadowedGroups:
    """A scheduler, a manager, a shadow per group, and everything that they have found wrong so far."""

    def __init__(self, config: EngineConfig, specs: Sequence[GroupSpec], max_model_len: int) -> None:
        assert config.num_blocks is not None
        tally = Tally()
        self.events = tally.events
        self.manager = KVCacheManager(
            specs,
            config.num_blocks,
            max_model_len,
            enable_caching=config.enable_prefix_caching,
            watermark=config.watermark,
            retention_interval=config.prefix_cache_retention_interval,
            max_tokens_per_step=config.max_num_batched_tokens,
            observer=tally,
        )
        self.specs = [group.spec for group in self.manager.coordinator.groups]
        self.scheduler = Scheduler(config, self.manager, max_model_len, observer=tally)
        self.hasher = (
            BlockHasher("sha256", hash_block_size(specs), seed="0") if config.enable_prefix_caching else None
        )
        self.shadows = [self._shadow(spec, config.num_blocks) for spec in specs]
        self.violations: list[Violation] = []
        self._tables: dict[str, list[list[int]]] = {}  # by request, per group: as a model runner knows them
        self._known: dict[str, list[int]] = {}  # by request: tokens that a model runner knows

    @staticmethod
    def _shadow(spec: GroupSpec, num_blocks: int) -> ShadowKV:
        if spec.kind == MAMBA:
            return ShadowStates(num_blocks, spec.block_size)
        return ShadowKV(num_blocks, spec.block_size, window=spec.window, chunk=spec.chunk)

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, priority: int, salt: str | None
    ) -> None:
        """Enters a request. Mutates: the scheduler, the shadows' truth."""
        for shadow in self.shadows:
            shadow.begin(request_id, salt, prompt)
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens),
            hasher=self.hasher,
            arrival=len(self.shadows[0]._tokens),
            priority=priority,
            cache_salt=salt,
        )
        self.scheduler.add_request(request)

    def step(self, *, fails: bool = False) -> None:
        """One step; a step that fails leaves garbage wherever it was to write. Mutates: everything."""
        before = self._held()
        output = self.scheduler.schedule()
        self._learn()
        self._check_step(output, before, fails)
        if fails and output.scheduled:
            self.scheduler.take_back(output)
            self.events["step failed"] += 1
        else:
            self._sample(output)
        self.scheduler.check_integrity()
        self._check_findable()

    def _check_step(self, output: SchedulerOutput, before: list[Held], fails: bool) -> None:
        for request_id in output.finished_ids | output.preempted_ids:
            self._tables.pop(request_id, None)
        for share in output.scheduled:
            if share.kind != "running":
                self._tables[share.request_id] = [[] for _ in self.specs]
                self._known[share.request_id] = list(share.token_ids)
                self.events["null block"] += 0 in (share.block_ids or [[]])[-1]
            if share.block_ids is not None:
                for table, added in zip(self._tables[share.request_id], share.block_ids, strict=True):
                    table.extend(added)
        held = self._held()
        for i, shadow in enumerate(self.shadows):
            inputs = [self._input(share, self.specs[i], i) for share in output.scheduled]
            self.violations += shadow.run(StepInput(inputs, held[i], before[i]))
            if fails:
                first = 1 if self.specs[i].kind == MAMBA else 0  # the state to start from is not written
                shadow.spoil([slot for each in inputs for slot in each.slots[first:]])
        self._check_owners(held)

    def _input(self, share: ScheduledRequest, spec: GroupSpec, i: int) -> SequenceInput:
        """What the layers of one group get to see of one request."""
        first, end = share.num_computed_tokens, share.num_computed_tokens + share.num_tokens
        table, size, positions = self._tables[share.request_id][i], spec.block_size, range(first, end)
        if spec.kind == MAMBA:
            start = table[state_position(first, size)] if first else -1
            slots = [start, table[state_position(end, size)]]
        else:
            slots = [table[position // size] * size + position % size for position in positions]
        tokens = self._known[share.request_id][first:end]
        return SequenceInput(share.request_id, tokens, list(positions), slots, table, end)

    def _check_owners(self, held: list[Held]) -> None:
        """A block holds the layers of one group."""
        owner: dict[int, int] = {}
        for i, tables in enumerate(held):
            for request_id, blocks in tables.items():
                for block_id in blocks:
                    if owner.setdefault(block_id, i) != i:
                        text = f"holds block {block_id} for group {i}, which is group {owner[block_id]}'s"
                        self.violations.append(Violation("overwrite", request_id, text))

    def _sample(self, output: SchedulerOutput) -> None:
        """The token after a prefix is a function of its length and its last tokens, so that answers are shared, too."""
        sampled = {}
        for share in output.scheduled:
            request = self.scheduler.requests[share.request_id]
            if request.num_computed_tokens == request.num_tokens:
                sampled[share.request_id] = [(len(request.token_ids) + sum(request.token_ids[-2:])) % 4]
        for request_id, tokens in self.scheduler.update(output, sampled).items():
            self._known[request_id] += tokens
            for shadow in self.shadows:
                shadow.append(request_id, tokens)

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it stands."""
        self.scheduler.finish(request_id, RequestStatus.FINISHED_ABORTED)

    def leftovers(self) -> list[int]:
        """Blocks that somebody still holds although no request is left."""
        return [block.block_id for block in self.manager.block_pool.blocks if block.ref_count]

    def _held(self) -> list[Held]:
        """Per group: the blocks of every request by the word of the manager, null blocks left out."""
        ids = {request_id: self.manager.block_ids(request_id) for request_id in self.scheduler.requests}
        return [
            {request_id: [block for block in tables[i] if block] for request_id, tables in ids.items()}
            for i in range(len(self.specs))
        ]

    def _learn(self) -> None:
        for request_id, request in self.scheduler.requests.items():
            for spec, shadow in zip(self.specs, self.shadows, strict=True):
                keys = [block_key(digest, spec.group_id) for digest in spec.hashes(request.block_hashes)]
                self.violations += shadow.learn(request_id, keys)

    def _check_findable(self) -> None:
        """Mutates: violations. Hashes inside a block are passed over: no lookup asks for one."""
        self._learn()
        pool = self.manager.block_pool
        findable: list[dict[int, Hashable]] = [{} for _ in self.specs]
        for key, copies in pool._index.items():
            for block_id in copies:
                if key not in pool._tails.get(block_id, ()):
                    findable[group_of(key)][block_id] = key
        for shadow, keys in zip(self.shadows, findable, strict=True):
            self.violations += shadow.check_findable(keys)
