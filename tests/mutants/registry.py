"""Known-wrong engines: each is one misconception about the cache or the scheduler, written as one changed line.

A test that no wrong engine fails has not been shown to test anything. Random scenarios find only half of such
mistakes (measured on another engine: 5 of 12, and a stale index in 1 of 600 runs), so each one has a directed
test that must catch it.
"""

from __future__ import annotations

from tests.mutants.gemma import GEMMA
from tests.mutants.groups import GROUPS
from tests.mutants.hashing import HASHING
from tests.mutants.manager import MANAGER
from tests.mutants.pool import POOL
from tests.mutants.queues import QUEUES
from tests.mutants.runner import RUNNER
from tests.mutants.scheduler import SCHEDULER
from tests.mutants.states import STATES
from tests.mutants.v0 import V0_CACHE, V0_MANAGER
from tests.mutants.v0_steps import V0_SCHEDULER, V0_WORKER

V0 = (*V0_CACHE, *V0_MANAGER, *V0_SCHEDULER, *V0_WORKER)
MUTANTS = (*QUEUES, *POOL, *HASHING, *MANAGER, *SCHEDULER, *GROUPS, *RUNNER, *STATES, *GEMMA, *V0)
