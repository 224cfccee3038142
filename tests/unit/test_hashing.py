"""What identifies a block. Cases S23, S25 and S26 of the shared set; byte for byte it is checked by replaying
`hashes.json` in tests/conformance."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from unittest import mock

import pytest

from refengine.config import HASH_ALGORITHMS
from refengine.errors import ConfigError
from refengine.hashing import Adapter, BlockHash, BlockHasher, extra_keys, hash_function, start_value
from tests.unit.helpers import numbers

TOKENS = numbers(1, 8)


def keys(
    adapter: Adapter | None = None, salt: str | None = None, tokens: list[int] = TOKENS, **options: int
) -> list[BlockHash]:
    """k(...) of the cases: the hashes of the blocks of 4 tokens."""
    hashes: list[BlockHash] = []
    BlockHasher("sha256", 4, seed="0", **options).extend(hashes, tokens, adapter, salt)
    return hashes


# The chain


def test_the_chain_carries_the_whole_prefix() -> None:
    """Misconception: "equal tokens, equal block". K and V of the second block depend on the first one's tokens."""
    a, b = keys(tokens=[1, 2, 3, 4, 5, 6, 7, 8]), keys(tokens=[9, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0]
    assert a[1] != b[1]
    assert keys(tokens=[1, 2, 3, 4])[0] == a[0]


def test_a_block_is_no_permutation() -> None:
    """Misconception: "the set of tokens" or "their sum"."""
    assert (
        len({keys(tokens=order)[0] for order in ([1, 2, 3, 4], [4, 3, 2, 1], [2, 1, 3, 4], [0, 0, 5, 5])})
        == 4
    )


def test_only_full_blocks_have_a_hash() -> None:
    """Misconceptions: "a partial block is hashed too", "a block is full when the next one begins"."""
    for num_tokens in range(10):
        assert len(keys(tokens=numbers(1, num_tokens))) == num_tokens // 4


def test_extending_step_by_step_gives_the_same_chain() -> None:
    hasher, hashes = BlockHasher("sha256", 4, seed="0"), []
    for length in (1, 3, 4, 4, 7, 13):
        hasher.extend(hashes, numbers(1, length))
        assert hashes == keys(tokens=numbers(1, length))


def test_with_lookahead_a_hash_waits_for_the_next_tokens_and_covers_them() -> None:
    """For draft heads: K/V at a position depend on the tokens that follow."""
    assert len(keys(tokens=numbers(1, 8), lookahead=1)) == 1
    one, other = keys(tokens=[1, 2, 3, 4, 5], lookahead=1), keys(tokens=[1, 2, 3, 4, 6], lookahead=1)
    assert one[0] != other[0]
    assert one[0] != keys(tokens=[1, 2, 3, 4, 5])[0]


# Extra keys


def test_s23_an_empty_salt_is_no_salt() -> None:
    """S23. Misconception: "a salt that was passed counts, even if it is empty"."""
    assert keys() == keys(salt="")


def test_s23_a_salt_changes_every_block() -> None:
    """S23. Misconceptions: "the salt goes into every block" and "... into the first, so only that one differs"."""
    plain, salted = keys(), keys(salt="X")
    assert plain[0] != salted[0]
    assert plain[1] != salted[1]
    assert extra_keys(True, None, "X") == (("cache_salt", "X"),)
    assert extra_keys(False, None, "X") is None


def test_s23_salts_differ_and_repeat() -> None:
    assert keys(salt="X") == keys(salt="X")
    assert not set(keys(salt="X")) & set(keys(salt="Y"))


def test_s23_an_adapter_x_is_not_a_salt_x() -> None:
    """S23. Misconception: "the value is the key". Keys carry their kind."""
    assert keys(adapter=Adapter("X", "X"))[0] != keys(salt="X")[0]


def test_s23_the_adapters_path_is_part_of_the_key() -> None:
    """S23. Misconception: "an adapter is its name". Another path is other weights."""
    assert keys(adapter=Adapter("X", "/one"))[0] != keys(adapter=Adapter("X", "/two"))[0]


def test_s23_the_adapters_slot_is_not_part_of_the_key() -> None:
    """S23. Misconception: "the id identifies the adapter". It is a slot number, and changes on every load."""
    assert keys(adapter=Adapter("X", "/one", 1)) == keys(adapter=Adapter("X", "/one", 2))


def test_s23_the_adapter_is_a_key_of_every_block() -> None:
    """S23. Misconception: "like the salt, only in the first". vLLM's digests say otherwise."""
    adapter = Adapter("X", "/one")
    assert extra_keys(False, adapter, "salt") == (("lora", "X", "/one"),)
    assert extra_keys(True, adapter, "salt") == (("lora", "X", "/one"), ("cache_salt", "salt"))
    assert extra_keys(True, None, None) is None


# Functions and start values


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_digests_have_their_length_and_differ(algorithm: str) -> None:
    function = hash_function(algorithm)
    digests = {function((b"parent", (token,), None)) for token in range(50)}
    assert len(digests) == 50
    assert {len(digest) for digest in digests} == {32 if algorithm.startswith("sha256") else 16}


def test_an_unknown_algorithm_names_the_near_match() -> None:
    with pytest.raises(ConfigError) as caught:
        hash_function("sha265")
    assert str(caught.value) == (
        "hash_algorithm 'sha265' is not one of sha256, sha256_cbor, xxhash, xxhash_cbor; did you mean 'sha256'?"
    )


def test_the_start_value_separates_engines() -> None:
    """A secret seed stops outsiders from preparing collisions."""
    assert start_value("sha256", "a") != start_value("sha256", "b")
    hashes: list[BlockHash] = []
    BlockHasher("sha256", 4, seed="secret").extend(hashes, TOKENS)
    assert not set(hashes) & set(keys())


def test_a_part_takes_the_place_of_the_algorithm() -> None:
    hasher = BlockHasher(
        "sha256", 4, seed="0", hash_block=lambda parent, tokens, extra: parent + bytes(tokens)
    )
    hashes: list[BlockHash] = []
    hasher.extend(hashes, TOKENS)
    assert hashes[1] == start_value("sha256", "0") + bytes(TOKENS)


SCRIPTS = {
    "built-in": "print(hash('seed'))",
    "fixed": (
        "from refengine.hashing import BlockHasher; h = []; BlockHasher('sha256', 4).extend(h, range(1, 9)); "
        "print(h[-1].hex())"
    ),
    "random": (
        "from refengine.hashing import BlockHasher; h = []; BlockHasher('xxhash', 4).extend(h, range(1, 9)); "
        "print(h[-1].hex())"
    ),
}


def in_two_processes(script: str, hash_seed: str | None) -> set[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    command = [sys.executable, "-c", script]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(2)]
    answers = {child.communicate()[0] for child in children}
    assert all(child.returncode == 0 for child in children)
    return answers


@pytest.mark.parametrize(
    ("script", "hash_seed", "equal"),
    [
        ("built-in", None, False),
        ("built-in", "7", True),
        ("fixed", None, True),
        ("random", None, False),
        ("random", "7", True),
    ],
)
def test_s26_same_prompt_two_processes(script: str, hash_seed: str | None, equal: bool) -> None:
    """S26. Misconception: "a hash is a hash". Only a fixed start value makes two processes agree."""
    assert (len(in_two_processes(SCRIPTS[script], hash_seed)) == 1) is equal


def test_s26_the_environment_decides_as_in_vllm() -> None:
    with mock.patch.dict(os.environ, {"PYTHONHASHSEED": "7"}):
        assert start_value("sha256") == start_value("sha256", "7")
    with mock.patch.dict(os.environ):
        os.environ.pop("PYTHONHASHSEED", None)
        assert start_value("sha256") == start_value("sha256", "vllm-none-hash")
        assert start_value("xxhash") != start_value("xxhash")


def test_s25_short_ids_collide_soon() -> None:
    """S25, last line: with 16-bit ids the first collision comes after about 323 ids, not after 65,536."""
    generator = random.Random(0)
    counts = []
    for _ in range(2000):
        seen: set[int] = set()
        while (identity := generator.getrandbits(16)) not in seen:
            seen.add(identity)
        counts.append(len(seen) + 1)
    assert 310 < sum(counts) / len(counts) < 335
