"""A mirror that has only the events, against the engine's own index, after every step of random workloads.

No model runs: what is stored and removed is decided by scheduler and cache manager, and any sampled token will do. So
these workloads can have groups of every kind, small pools, preemptions, aborted requests, and requests that announce
what they reuse.
"""

from __future__ import annotations

import random

import pytest

from refengine.config import EngineConfig
from refengine.hashing import BlockHasher
from refengine.sampling import SamplingParams
from refengine.v1.groups.spec import CHUNKED_LOCAL, FULL_ATTENTION, MAMBA, SLIDING_WINDOW, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.mirror import PrefixMirror
from refengine.v1.publisher import EventPublisher
from refengine.v1.request import Request, RequestStatus
from refengine.v1.scheduler import Scheduler

WORKLOADS, STEPS = 200, 40
MAX_MODEL_LEN = 96
MODELS = {
    "full": [GroupSpec(0, FULL_ATTENTION, 4)],
    "window": [GroupSpec(0, SLIDING_WINDOW, 4, window=9)],
    "full and window": [GroupSpec(0, FULL_ATTENTION, 4), GroupSpec(1, SLIDING_WINDOW, 4, window=6)],
    "full and states": [GroupSpec(0, FULL_ATTENTION, 4), GroupSpec(1, MAMBA, 4)],
    "full, window, states": [
        GroupSpec(0, FULL_ATTENTION, 4),
        GroupSpec(1, SLIDING_WINDOW, 4, window=10),
        GroupSpec(2, MAMBA, 4),
    ],
    "two block sizes": [GroupSpec(0, FULL_ATTENTION, 8), GroupSpec(1, SLIDING_WINDOW, 4, window=7)],
    "chunks": [GroupSpec(0, CHUNKED_LOCAL, 4, chunk=12), GroupSpec(1, FULL_ATTENTION, 4)],
}


class Workload:
    """A random engine without a model, its events published after each step."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.name = list(MODELS)[seed % len(MODELS)]
        groups = MODELS[self.name]
        sparse = any(group.kind in (SLIDING_WINDOW, MAMBA) for group in groups)
        config = EngineConfig(
            max_num_batched_tokens=rng.choice([16, 40]),
            max_num_seqs=rng.choice([2, 5]),
            policy=rng.choice(["fcfs", "priority"]),
            reserve_full_sequence=rng.random() < 0.5,
        )
        self.manager = KVCacheManager(
            groups,
            num_blocks=1 + len(groups) * rng.choice([14, 30]),
            max_model_len=MAX_MODEL_LEN,
            enable_events=True,
            retention_interval=rng.choice([None, 0, 8] if sparse else [None, 0]),
            max_tokens_per_step=config.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(config, self.manager, MAX_MODEL_LEN)
        self.hasher = BlockHasher("xxhash_cbor", 4, "0")
        self.publisher = EventPublisher()
        self.stems = [[rng.randrange(5) for _ in range(40)] for _ in range(3)]
        self.num_requests = 0

    def step(self) -> None:
        """Some arrive, one may leave, and the engine takes a step. Mutates: everything."""
        rng, scheduler = self.random, self.scheduler
        for _ in range(rng.choice([0, 1, 1, 2])):
            self._arrive()
        if scheduler.requests and rng.random() < 0.1:
            scheduler.finish(rng.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.03:
            self.manager.reset_prefix_cache()
        output = scheduler.schedule()
        done = {
            share.request_id: [rng.randrange(5)]
            for share in output.scheduled
            if scheduler.requests[share.request_id].num_computed_tokens
            == scheduler.requests[share.request_id].num_tokens
        }
        scheduler.update(output, done)
        self.publisher.publish(self.manager.take_events())

    def _arrive(self) -> None:
        rng = self.random
        prompt = rng.choice(self.stems)[: rng.randint(1, 40)] + [
            rng.randrange(5) for _ in range(rng.randint(1, 9))
        ]
        self.scheduler.add_request(
            Request(
                f"r{self.num_requests}",
                prompt,
                SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True),
                hasher=self.hasher,
                arrival=self.num_requests,
                priority=rng.randrange(3),
                cache_salt=rng.choice([None, None, None, "salt"]),
                report_full=rng.random() < 0.4,
            )
        )
        self.num_requests += 1


@pytest.mark.parametrize("first", range(0, WORKLOADS, 20))
def test_the_mirror_is_the_index(first: int) -> None:
    happened = dict.fromkeys(MODELS, 0)
    for seed in range(first, first + 20):
        workload = Workload(seed)
        groups = MODELS[workload.name]
        mirror, late = PrefixMirror(groups), PrefixMirror(groups, "full")
        workload.publisher.subscribe(mirror.receive)
        for step in range(STEPS):
            if step == STEPS // 3:
                workload.publisher.subscribe(late.receive)
            workload.step()
            index = workload.manager.block_pool.prefixes()
            where = f"workload {seed} ({workload.name}), step {step}"
            assert mirror.prefixes() == index, where
            assert late.prefixes() <= index, f"the late mirror of {where}"
        happened[workload.name] += len(late.prefixes())
    assert all(happened.values()), f"the late mirrors learned nothing: {happened}"
