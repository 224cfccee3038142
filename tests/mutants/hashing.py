"""Misconceptions about what identifies a block."""

from __future__ import annotations

from tests.mutants.world import Mutant

HASHING = (
    Mutant(
        "a block is identified by its own tokens alone",
        "hashing",
        "parent if parent is not None else self.start, tuple(token_ids)",
        "self.start, tuple(token_ids)",
        ("test_hashing::test_the_chain_carries_the_whole_prefix",),
    ),
    Mutant(
        "a block is full when the next one begins",
        "hashing",
        "+ self.lookahead <= len(token_ids)",
        "+ self.lookahead < len(token_ids)",
        ("test_hashing::test_only_full_blocks_have_a_hash",),
    ),
    Mutant(
        "the salt need not be in the key",
        "hashing",
        "if is_first_block and cache_salt:",
        "if False:",
        (
            "test_hashing::test_s23_a_salt_changes_every_block",
            "test_v1_kv_cache_manager::test_s23_salt_and_adapter_separate_the_hits",
        ),
    ),
    Mutant(
        "the salt goes into all blocks but the first",
        "hashing",
        "if is_first_block and cache_salt:",
        "if not is_first_block and cache_salt:",
        ("test_hashing::test_s23_a_salt_changes_every_block",),
    ),
    Mutant(
        "the salt goes into every block",
        "hashing",
        "if is_first_block and cache_salt:",
        "if cache_salt:",
        ("test_hashing::test_s23_a_salt_changes_every_block",),
    ),
    Mutant(
        "an empty salt is a salt",
        "hashing",
        "if is_first_block and cache_salt:",
        "if is_first_block and cache_salt is not None:",
        ("test_hashing::test_s23_an_empty_salt_is_no_salt",),
    ),
    Mutant(
        "equal tokens have equal keys and values, whatever the adapter",
        "hashing",
        "if adapter is not None:",
        "if False:",
        ("test_lora::test_v1_finds_the_blocks_of_one_adapter_only",),
    ),
    Mutant(
        "an adapter is identified by its name, not by its path",
        "hashing",
        '(("lora", adapter.name, adapter.path),)',
        '(("lora", adapter.name),)',
        (
            "test_hashing::test_s23_the_adapters_path_is_part_of_the_key",
            "test_v1_kv_cache_manager::test_s23_salt_and_adapter_separate_the_hits",
        ),
    ),
    Mutant(
        "an adapter is identified by its slot",
        "hashing",
        '(("lora", adapter.name, adapter.path),)',
        '(("lora", adapter.name, adapter.path, adapter.adapter_id),)',
        ("test_hashing::test_s23_the_adapters_slot_is_not_part_of_the_key",),
    ),
    Mutant(
        "keys need no tag: adapter x equals salt x",
        "hashing",
        '(("lora", adapter.name, adapter.path),)',
        '(("cache_salt", adapter.name),)',
        ("test_hashing::test_s23_an_adapter_x_is_not_a_salt_x",),
    ),
    Mutant(
        "the adapter goes into the first block only, like the salt",
        "hashing",
        "if adapter is not None:",
        "if adapter is not None and is_first_block:",
        ("test_hashing::test_s23_the_adapter_is_a_key_of_every_block",),
    ),
    Mutant(
        "generated tokens are not part of the chain",
        "v1.request",
        "self.token_ids.extend(token_ids)\n        self._extend_hashes()",
        "self.token_ids.extend(token_ids)",
        ("test_v1_request::test_s04_generated_tokens_extend_the_hashes",),
    ),
)
