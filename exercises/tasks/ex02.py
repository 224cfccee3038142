"""Tasks of exercise 02: the hash of a block, the chain, what shares, a key that is too small, and what it costs."""

from __future__ import annotations

from collections.abc import Callable

from exercises.grader import Task, WrongAnswer
from exercises.tasks.ex02_checks import (
    check_block_hashes,
    check_collisions,
    check_cost,
    check_hash_block,
    check_keys,
    check_places,
    check_sharing,
    expected_places,
)

TASKS = [
    Task(
        id="02.1",
        kind="build",
        title="the hash of one block",
        points=15,
        answers={"hash_block": Callable},
        check=check_hash_block,
        hints=(
            "Three things go in: the parent, the tokens, the extra keys. One sequence of bytes has to hold them.",
            "cbor2.dumps(value, canonical=True) makes bytes of a tuple; hashlib.sha256(data).digest() is the digest.",
            "The value is (parent, tuple(token_ids), extra), in this order, also if extra is None.",
        ),
        wrong=(
            WrongAnswer(
                "no parent",
                "the parent is left out",
                edits=(("(parent, tuple(token_ids), extra)", "(tuple(token_ids), extra)"),),
            ),
            WrongAnswer(
                "text without separators",
                "digits run together",
                source=(
                    "def hash_block(parent, token_ids, extra):\n"
                    '    text = parent.hex() + "".join(map(str, token_ids)) + str(extra)\n'
                    "    return hashlib.sha256(text.encode()).digest()\n"
                ),
            ),
            WrongAnswer(
                "no extra keys",
                "the extra keys are left out",
                edits=(("(parent, tuple(token_ids), extra)", "(parent, tuple(token_ids), None)"),),
            ),
            WrongAnswer(
                "Python's hash",
                "a hash of this process only",
                source=(
                    "def hash_block(parent, token_ids, extra):\n"
                    '    return (hash((parent, tuple(token_ids), extra)) % 2**64).to_bytes(8, "big")\n'
                ),
            ),
            WrongAnswer(
                "pickle",
                "bytes made by pickle",
                source=(
                    "import pickle\n\n\n"
                    "def hash_block(parent, token_ids, extra):\n"
                    "    data = pickle.dumps((parent, tuple(token_ids), extra), protocol=5)\n"
                    "    return hashlib.sha256(data).digest()\n"
                ),
            ),
        ),
        other="""
def hash_block(parent, token_ids, extra):
    digest = hashlib.new("sha256")
    digest.update(bytes([0x83]))
    for part in (parent, list(token_ids), extra):
        digest.update(cbor2.dumps(part, canonical=True))
    return digest.digest()
""",
        part="hash_block",
    ),
    Task(
        id="02.2",
        kind="build",
        title="the chain",
        points=25,
        answers={"block_hashes": Callable},
        check=check_block_hashes,
        hints=(
            "Walk over the starts of the full blocks: 0, block_size, 2 * block_size, and so on.",
            "Keep the last hash in a variable that begins as `start`; it is the parent of the next block.",
            'The keys are a tuple: ("lora", name, path) if there is an adapter, then ("cache_salt", salt) in the first '
            "block if the salt is not empty. An empty tuple becomes None.",
        ),
        wrong=(
            WrongAnswer(
                "rounds up",
                "a partial block is hashed",
                edits=(("len(token_ids) - block_size + 1", "len(token_ids)"),),
            ),
            WrongAnswer(
                "start value every time",
                "no chain",
                edits=(("parent = hash_block(parent,", "parent = hash_block(start,"),),
            ),
            WrongAnswer(
                "first hash as parent",
                "every block has the same parent",
                edits=(
                    ("parent = hash_block(parent,", "parent = hash_block(hashes[0] if hashes else start,"),
                ),
            ),
            WrongAnswer(
                "salt everywhere",
                "the salt is in every block",
                edits=(("if begin == 0 and cache_salt:", "if cache_salt:"),),
            ),
            WrongAnswer(
                "salt forgotten",
                "the salt is nowhere",
                edits=(("if begin == 0 and cache_salt:", "if False:"),),
            ),
            WrongAnswer(
                "empty salt",
                "an empty salt is a salt",
                edits=(("if begin == 0 and cache_salt:", "if begin == 0 and cache_salt is not None:"),),
            ),
            WrongAnswer(
                "adapter's number",
                "the adapter by its number",
                edits=(("adapter.name, adapter.path", "adapter.adapter_id"),),
            ),
            WrongAnswer(
                "adapter's name",
                "the adapter by its name alone",
                edits=(("adapter.name, adapter.path", "adapter.name"),),
            ),
            WrongAnswer(
                "adapter once",
                "the adapter in the first block only",
                edits=(("if adapter is not None:", "if adapter is not None and begin == 0:"),),
            ),
            WrongAnswer(
                "bare values",
                "the kind is left out",
                edits=(
                    ('("lora", adapter.name, adapter.path)', "(adapter.name, adapter.path)"),
                    ('("cache_salt", cache_salt)', "cache_salt"),
                ),
            ),
            WrongAnswer("empty tuple", "no keys is an empty list", edits=(("keys or None", "keys"),)),
        ),
        other="""
def block_hashes(token_ids, block_size, start, hash_block, adapter=None, cache_salt=None):
    of_all = [("lora", adapter.name, adapter.path)] if adapter else []
    hashes = [start]
    for number in range(len(token_ids) // block_size):
        own = [("cache_salt", cache_salt)] if cache_salt and not number else []
        tokens = tuple(token_ids[number * block_size :][:block_size])
        hashes.append(hash_block(hashes[-1], tokens, tuple(of_all + own) or None))
    return hashes[1:]
""",
    ),
    Task(
        id="02.3",
        kind="predict",
        title="who shares what",
        points=15,
        answers={"shared_with_ada": list, "shared_with_legal": list},
        check=check_sharing,
        hints=(
            "Cut each prompt into fours first, and drop what is left over.",
            "Go from left to right and stop at the first block that differs: nothing behind it is shared.",
            "An empty salt is none; a salt changes block 0 and with it all others; the number of an adapter is no key.",
        ),
        wrong=(
            WrongAnswer(
                "tokens only",
                "tokens without their past",
                source="shared_with_ada = [3, 2, 2, 2, 3, 0]\nshared_with_legal = [3, 0]",
            ),
            WrongAnswer(
                "salt in one block",
                "a salt ends with its block",
                source="shared_with_ada = [3, 2, 1, 0, 3, 2]\nshared_with_legal = [3, 0]",
            ),
            WrongAnswer(
                "partial",
                "a partial block is shared",
                source="shared_with_ada = [3, 3, 1, 0, 3, 0]\nshared_with_legal = [3, 0]",
            ),
            WrongAnswer(
                "number",
                "the adapter by its number",
                source="shared_with_ada = [3, 2, 1, 0, 3, 0]\nshared_with_legal = [0, 0]",
            ),
            WrongAnswer(
                "name",
                "the adapter by its name alone",
                source="shared_with_ada = [3, 2, 1, 0, 3, 0]\nshared_with_legal = [3, 3]",
            ),
        ),
        other="import numpy\nshared_with_ada = tuple(numpy.array([3, 2, 1, 0, 3, 0]))\nshared_with_legal = (3, 0)",
    ),
    Task(
        id="02.4",
        kind="bug",
        title="yesterday's adapter answers",
        points=15,
        answers={"extra_keys": Callable},
        check=check_keys,
        hints=(
            "What is different about the adapter on Tuesday? Is it in the key?",
            "The name and the number are the same on both days. The path is not.",
            'The key of an adapter is ("lora", adapter.name, adapter.path).',
        ),
        wrong=(
            WrongAnswer(
                "number instead of path",
                "the adapter by its number",
                edits=(("adapter.name, adapter.path", "adapter.name, adapter.adapter_id"),),
            ),
            WrongAnswer(
                "number besides",
                "the adapter by its number",
                edits=(("adapter.name, adapter.path", "adapter.name, adapter.path, adapter.adapter_id"),),
            ),
            WrongAnswer(
                "glued together",
                "name and path run together",
                edits=(("adapter.name, adapter.path", "adapter.name + adapter.path"),),
            ),
            WrongAnswer(
                "no kind",
                "the kind is left out",
                edits=(('("lora", adapter.name, adapter.path)', "(adapter.name, adapter.path)"),),
            ),
        ),
        other="""
def extra_keys(is_first_block, adapter, cache_salt):
    keys = []
    if adapter:
        keys.append(("lora", adapter.name, adapter.path))
    if cache_salt and is_first_block:
        keys.append(("cache_salt", cache_salt))
    return tuple(keys) if keys else None
""",
    ),
    Task(
        id="02.5",
        kind="predict",
        title="collisions, and two processes",
        points=10,
        answers={"trusting": int, "comparing": int, "processes": list, "sixteen_bits": int},
        check=check_collisions,
        hints=(
            "With one hash for everything, what does the index say to the hash of 50 51 52 53?",
            "A hit is made of whole blocks and leaves a token to compute. Of five tokens that is at most one block.",
            "For n hashes, a collision is due after about sqrt(pi / 2 * n) blocks.",
        ),
        wrong=(
            WrongAnswer(
                "nothing is found",
                "the engine compares tokens",
                source="trusting = 0\ncomparing = 0\nprocesses = [False, True, False]\nsixteen_bits = 321",
            ),
            WrongAnswer(
                "half of all ids",
                "one try per block",
                source="trusting = 4\ncomparing = 0\nprocesses = [False, True, False]\nsixteen_bits = 32768",
            ),
            WrongAnswer(
                "SHA-256 is SHA-256",
                "the start value does not matter",
                source="trusting = 4\ncomparing = 0\nprocesses = [False, True, True]\nsixteen_bits = 321",
            ),
        ),
        other="""
import numpy

trusting, comparing = numpy.int64(4), 0
processes = (False, True, False)
sixteen_bits = 321
""",
    ),
    Task(
        id="02.6",
        kind="measure",
        title="what a name costs",
        points=10,
        answers={"bytes_hashed": Callable, "dearest": int, "dearer": str},
        check=check_cost,
        hints=(
            "Let block_hashes do the walking: give it a hash function of yours that counts.",
            "Inside: counted += len(cbor2.dumps((parent, token_ids, extra), canonical=True)), then hash as before.",
            "Each block brings 34 bytes of parent, 1 byte for no keys, 1 for the list of three, and its tokens.",
        ),
        wrong=(
            WrongAnswer(
                "tokens only",
                "only the tokens",
                edits=(
                    ("cbor2.dumps((parent, token_ids, extra), canonical=True)", "cbor2.dumps(token_ids)"),
                ),
            ),
            WrongAnswer(
                "large is dear",
                "large blocks cost more",
                edits=(("dearest = 1", "dearest = 64"),),
            ),
            WrongAnswer(
                "lookup",
                "the lookup is dearer",
                edits=(('dearer = "hashing"', 'dearer = "lookup"'),),
            ),
        ),
        other="""
def bytes_hashed(token_ids, block_size):
    total = 0
    for end in range(block_size, len(token_ids) + 1, block_size):
        block = tuple(token_ids[end - block_size : end])
        total += len(cbor2.dumps((bytes(32), block, None), canonical=True))
    return total


dearest = 1
dearer = "hashing"
""",
    ),
    Task(
        id="02.7",
        kind="map",
        title="where it is in vLLM",
        points=10,
        answers={name: str for name in expected_places()},
        check=check_places,
        hints=(
            "V0's names for blocks begin with PrefixCachingBlock; V1 has BlockPool and plain functions.",
            "In V1 the hashes live on the request; in V0 the adapter is asked of the sequence.",
            "V0 finds a prefix with PrefixCachingBlockAllocator.find_cached_blocks_prefix, V1 block by block with "
            "BlockPool.get_cached_block.",
        ),
        wrong=(
            WrongAnswer(
                "generations swapped",
                "the other generation",
                edits=(
                    (
                        'v1_find = "BlockPool.get_cached_block"',
                        'v1_find = "PrefixCachingBlockAllocator.find_cached_blocks_prefix"',
                    ),
                ),
            ),
        ),
        other="""
v1_one_block = "hash_block_tokens()"
v0_one_block = "PrefixCachingBlock.hash_block_tokens()"
v1_more_tokens = "update_block_hashes"
v0_adapter = "extra_hash"
v1_find = "get_cached_block"
v0_find = "find_cached_blocks_prefix"
""",
    ),
]
