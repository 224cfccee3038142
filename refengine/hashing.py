"""What identifies a block: a hash over its tokens, everything before it, and whatever else changes its K/V.

K and V at a position depend on every earlier token, so equal tokens in a block are not enough: the hash of a
block covers the hash of its parent, and through it the whole prefix. A chain of hashes is therefore a chain
of prefixes, and one dictionary from hash to block is a prefix index.

Two requests with equal tokens may still have different K/V (another adapter) or must not share on purpose
(another tenant). Both enter as *extra keys*. The byte layout is vLLM's, digest for digest.
vLLM: V0 core/block/prefix_caching_block.py (PrefixCachingBlock.hash_block_tokens, Python's own hash());
V1 v1/core/kv_cache_utils.py (hash_block_tokens, generate_block_hash_extra_keys) and utils/hashing.py.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cbor2
import xxhash

from refengine.config import HASH_ALGORITHMS, one_of
from refengine.errors import ConfigError

BlockHash = bytes  # a digest: 32 bytes for the SHA-256 variants, 16 for the xxHash ones
ExtraKeys = tuple[tuple[str, ...], ...]  # tagged, so that an adapter "x" and a salt "x" differ
HashFunction = Callable[[Any], BlockHash]
HashBlock = Callable[[BlockHash, tuple[int, ...], Any], BlockHash]  # parent, tokens, extra keys

DEFAULT_SEED = "vllm-none-hash"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter as the hash sees it: name and path. `adapter_id` is a slot number and not part of the key."""

    name: str
    path: str
    adapter_id: int = 0

    def __post_init__(self) -> None:
        for name in ("name", "path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"an adapter's {name} must be text, not {getattr(self, name)!r}")


def hash_function(algorithm: str) -> HashFunction:
    """The function behind an algorithm's name: serialise a value, digest the bytes.

    `sha256` and `xxhash` serialise with pickle, which is tied to Python and writes a repeated object as a
    back-reference; the `_cbor` variants write canonical CBOR, which any language can reproduce. The xxHash
    variants are faster and easy to collide on purpose: not for tenants that distrust each other.
    """
    one_of("hash_algorithm", algorithm, HASH_ALGORITHMS)
    digest = _sha256 if algorithm.startswith("sha256") else xxhash.xxh3_128_digest
    serialise = _cbor if algorithm.endswith("_cbor") else _pickle
    return lambda value: digest(serialise(value))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)  # the number is part of the bytes: pinned, as the default may move


def _cbor(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


def start_value(algorithm: str, seed: str | None = None) -> BlockHash:
    """The parent of every first block.

    A public constant lets other processes and other machines compute the same hashes; a secret or random one
    stops outsiders from preparing collisions. vLLM takes PYTHONHASHSEED if it is set, else a fixed text for
    SHA-256 and 32 random bytes for xxHash.
    """
    if seed is None:
        seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        seed = DEFAULT_SEED if algorithm.startswith("sha256") else os.urandom(32).hex()
    return hash_function(algorithm)(seed)


def extra_keys(is_first_block: bool, adapter: Adapter | None, cache_salt: str | None) -> ExtraKeys | None:
    """What a block's hash covers besides its tokens, or None for nothing.

    The adapter goes into every block, the salt only into the first: the chain carries it to all others.
    """
    keys: ExtraKeys = ()
    if adapter is not None:
        keys += (("lora", adapter.name, adapter.path),)
    if is_first_block and cache_salt:
        keys += (("cache_salt", cache_salt),)
    return keys or None


class BlockHasher:
    """Hashes the full blocks of token lists, each chained to the one before.

    `block_size` in tokens. With `lookahead` n > 0 the hash of a block also covers the n tokens after it, and
    exists only once they do: for draft heads whose K/V at a position depend on the next tokens.
    """

    def __init__(
        self,
        algorithm: str,
        block_size: int,
        seed: str | None = None,
        lookahead: int = 0,
        hash_block: HashBlock | None = None,
    ) -> None:
        """`hash_block` takes the place of the algorithm, but not of its start value."""
        function = hash_function(algorithm)
        self._hash_block = hash_block or (
            lambda parent, token_ids, extra: function((parent, token_ids, extra))
        )
        self.start = start_value(algorithm, seed)
        self.block_size = block_size
        self.lookahead = lookahead

    def hash_block(self, parent: BlockHash | None, token_ids: Sequence[int], extra: Any = None) -> BlockHash:
        """Digest of one block. `parent` None: this is the first block of its request."""
        return self._hash_block(parent if parent is not None else self.start, tuple(token_ids), extra)

    def extend(
        self,
        hashes: list[BlockHash],
        token_ids: Sequence[int],
        adapter: Adapter | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Appends the hashes of blocks of `token_ids` that became full since the last call.

        Mutates: `hashes`, which holds the chain so far and is one entry per full block afterwards.
        """
        while (end := (len(hashes) + 1) * self.block_size) + self.lookahead <= len(token_ids):
            start = end - self.block_size
            extra: Any = extra_keys(start == 0, adapter, cache_salt)
            if self.lookahead:
                extra = (extra, *token_ids[end : end + self.lookahead])
            hashes.append(self.hash_block(hashes[-1] if hashes else None, token_ids[start:end], extra))
