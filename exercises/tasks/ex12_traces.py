"""vLLM's recorded decisions about windows and chunks; they are replayed as those about several groups are."""

from __future__ import annotations

from exercises.tasks.ex03_traces import golden
from exercises.tasks.ex13_traces import replay, replay_bare

__all__ = ["RELEASE_TRACES", "WINDOW_TRACES", "golden", "replay", "replay_bare"]

RELEASE_TRACES = ("script_swa_release", "kv_swa_nocache_04", "kv_swa_nocache_06", "rand_nocache_swa")
WINDOW_TRACES = (
    "script_swa_release",
    "script_swa_retention_zero",
    "rand_swa",
    "rand_swa_bs2",
    "rand_swa_retention0",
    "rand_swa_retention16",
    "kv_swa_20",
    "kv_swa_ret_10",
    "kv_swa_eagle_07",
)
