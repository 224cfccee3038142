"""vLLM's first generation, as it was in release 0.7.3: two phases, a block manager, and the skip in the worker."""
