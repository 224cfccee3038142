"""How the answers of exercise 02 are judged: by what vLLM recorded, and by the cases S23, S25 and S26.

A chain is judged through the calls that it makes of the hash function it is given: what it asks for says what it
has misunderstood, however it is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import cbor2

from exercises.course import current
from exercises.grader import Report
from refengine.hashing import Adapter, BlockHasher, start_value
from refengine.sampling import SamplingParams
from refengine.trace.codemap import call_path, topic
from refengine.v1.groups.spec import FULL_ATTENTION, GroupSpec
from refengine.v1.kv_cache_manager import KVCacheManager
from refengine.v1.request import Request, RequestStatus

ALGORITHM, SEED = "sha256_cbor", "0"
START = start_value(ALGORITHM, SEED)
LEGAL = Adapter("legal", "adapters/legal-v1", adapter_id=7)
DIGITS = 12  # of a digest, in a table

HashBlock = Callable[[bytes, tuple[int, ...], Any], bytes]


# -- what vLLM recorded, and what the engine does ---------------------------------------------------------------


@cache
def recording(name: str) -> dict[str, Any]:
    """A recorded file by its name."""
    path = current().root / "tests" / "conformance" / "traces" / "v1" / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def tuples(keys: Sequence[Sequence[Any]] | None) -> tuple[tuple[Any, ...], ...] | None:
    return tuple(map(tuple, keys)) if keys else None


def adapter_of(raw: dict[str, Any] | None) -> Adapter | None:
    return Adapter(raw["name"], raw["path"], raw.get("id", 0)) if raw else None


def sha256_cbor(parent: bytes, token_ids: Sequence[int], extra: Any) -> bytes:
    return hashlib.sha256(cbor2.dumps((parent, tuple(token_ids), extra), canonical=True)).digest()


def reference(
    token_ids: Sequence[int], block_size: int, adapter: Adapter | None = None, cache_salt: str | None = None
) -> list[bytes]:
    """The chain as the engine makes it."""
    hashes: list[bytes] = []
    BlockHasher(ALGORITHM, block_size, SEED).extend(hashes, token_ids, adapter, cache_salt)
    return hashes


def hit(hash_block: HashBlock | None, written: list[int], read: list[int]) -> int:
    """Tokens of `read` that are found after a request with `written` has come and gone. Block size 4."""
    hasher = BlockHasher(ALGORITHM, 4, SEED, hash_block=hash_block)
    manager = KVCacheManager([GroupSpec(0, FULL_ATTENTION, 4)], num_blocks=10, max_model_len=64)
    writer = Request("writer", written, SamplingParams(), hasher=hasher)
    manager.allocate_slots(writer, len(written))
    writer.status = RequestStatus.RUNNING
    manager.free(writer)
    return manager.get_computed_blocks(Request("reader", read, SamplingParams(), hasher=hasher))[1]


def short(digests: Any) -> Any:
    """Digests by their first digits; whatever is no digest, as it is."""
    if isinstance(digests, (bytes, bytearray)):
        return digests.hex()[:DIGITS]
    if isinstance(digests, (list, tuple)):
        return [short(digest) for digest in digests]
    return digests


# -- 02.1 the hash of one block ---------------------------------------------------------------------------------

PARENTLESS = (
    "the parent is left out",
    "Two blocks with equal tokens get one hash, whatever stood before them. K and V depend on all of it.",
)
RUN_TOGETHER = (
    "digits run together",
    "Written one after the other, 1 23 and 12 3 are the same text. Something has to say where a token ends.",
)
KEYLESS = (
    "the extra keys are left out",
    "A request with an adapter or a salt finds the blocks of one without.",
)
THIS_PROCESS = (
    "a hash of this process only",
    "Python mixes a secret of the process into hash(): another process, or this one tomorrow, disagrees.",
)
PICKLED = (
    "bytes made by pickle",
    "This is the algorithm `sha256`. The task asks for `sha256_cbor`, whose bytes do not depend on Python.",
)


def check_hash_block(hash_block: HashBlock, report: Report) -> None:
    other = bytes(range(32))
    keys = (("cache_salt", "acme"),)
    with report.case("another parent gives another hash"):
        got = [hash_block(parent, (1, 2, 3, 4), None) for parent in (START, other)]
        if got[0] == got[1]:
            report.misconception(*PARENTLESS)
        report.true(got[0] != got[1], "The tokens 1 2 3 4 have one hash after two different parents.")
    with report.case("the tokens 1 23 are not the tokens 12 3"):
        got = [hash_block(START, tokens, None) for tokens in ((1, 23), (12, 3))]
        if got[0] == got[1]:
            report.misconception(*RUN_TOGETHER)
        report.true(got[0] != got[1], "1 23 and 12 3 have the same hash.")
    with report.case("extra keys give another hash"):
        got = [hash_block(START, (1, 2, 3, 4), extra) for extra in (None, keys)]
        if got[0] == got[1]:
            report.misconception(*KEYLESS)
        report.true(got[0] != got[1], "1 2 3 4 has one hash with a salt and without.")
    with report.case("S26: the digests that vLLM recorded in another process"):
        for block in recording("hashes")["algorithms"][ALGORITHM]["blocks"]:
            parent = bytes.fromhex(block["parent_hex"]) if block["parent_hex"] else START
            value = (parent, tuple(block["token_ids"]), tuples(block["extra_keys"]))
            digest = hash_block(*value)
            classify_digest(digest, value, report)
            report.equal(bytes.fromhex(block["digest_hex"]), digest, block["note"])
    with report.case("S25: another content is no hit, the same one is"):
        report.equal(0, hit(hash_block, list(range(1, 9)), [50, 51, 52, 53, 54]), "hit of other tokens")
        report.equal(8, hit(hash_block, list(range(1, 9)), list(range(1, 10))), "hit of the same tokens")


def classify_digest(got: Any, value: tuple[Any, ...], report: Report) -> None:
    """Names the well-known ways to a wrong digest of `value`."""
    report.true(isinstance(got, bytes), f"It should return bytes, a digest; it returned {short(got)!r}.")
    if BlockHasher("sha256", 4, SEED).hash_block(*value) == got:
        report.misconception(*PICKLED)
    own = (hash(value), hash((value[0], *value[1], value[2])), hash(str(value)), hash(value[:2]))
    number = (int.from_bytes(got, "big"), int.from_bytes(got[:8], "little"))
    if any(one % 2**64 in (mine % 2**64 for mine in own) for one in number):
        report.misconception(*THIS_PROCESS)


# -- 02.2 the chain ---------------------------------------------------------------------------------------------


@dataclass
class Spy:
    """The real hash of a block. It remembers what it was asked, and for which request."""

    block_size: int
    adapter: Adapter | None
    cache_salt: str | None
    parents: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    keys: list[list[Any]] = field(default_factory=list)  # per block, all nesting removed

    def __call__(self, parent: bytes, token_ids: Sequence[int], extra: Any) -> bytes:
        self.parents.append(parent)
        self.sizes.append(len(token_ids))
        self.keys.append(flat(extra))
        return sha256_cbor(parent, token_ids, extra)

    @property
    def path_missing(self) -> bool:
        """Some block's key has the adapter's name without its path."""
        adapter = self.adapter
        return adapter is not None and any(adapter.name in k and adapter.path not in k for k in self.keys)

    @property
    def kinds_missing(self) -> bool:
        kinds = {"lora": self.adapter, "cache_salt": self.cache_salt}
        return any(value and kind not in self.keys[0] for kind, value in kinds.items())


def flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flat(part)]
    return [value]


# A wrong idea, how it shows in what the hash function was asked, and why it is wrong. The first that fits counts.
MISREADINGS: tuple[tuple[str, Callable[[Spy], object], str], ...] = (
    (
        "a partial block is hashed",
        lambda spy: min(spy.sizes) < spy.block_size,
        "Its hash would be wrong with the next token. It has none until it is full.",
    ),
    (
        "no chain",
        lambda spy: len(spy.parents) > 1 and set(spy.parents) == {START},
        "Each block was hashed with the start value as its parent, so what stands before it is not covered.",
    ),
    (
        "every block has the same parent",
        lambda spy: len(spy.parents) > 2 and len(set(spy.parents[1:])) == 1,
        "The parent of block 2 is block 1, not block 0.",
    ),
    (
        "an empty salt is a salt",
        lambda spy: spy.cache_salt == "" and any("" in keys for keys in spy.keys),
        "A request with the salt '' shares with requests that have none.",
    ),
    (
        "the salt is in every block",
        lambda spy: spy.cache_salt and any(spy.cache_salt in keys for keys in spy.keys[1:]),
        "It belongs in the first block only; the chain carries it to the others.",
    ),
    (
        "the salt is nowhere",
        lambda spy: spy.cache_salt and spy.cache_salt not in spy.keys[0],
        "Nothing keeps the tenants apart: they share all blocks.",
    ),
    (
        "the adapter by its number",
        lambda spy: spy.adapter and any(spy.adapter.adapter_id in keys for keys in spy.keys),
        "The number is where an adapter is kept. The same one may get another number, another one the same.",
    ),
    (
        "the adapter by its name alone",
        lambda spy: spy.path_missing,
        "A name may be pointed at another path, with other weights behind it.",
    ),
    (
        "the adapter in the first block only",
        lambda spy: spy.adapter and spy.adapter.name in spy.keys[0] and spy.adapter.name not in spy.keys[-1],
        "The chain would carry it, but vLLM repeats it in every block, and its digests come out only so.",
    ),
    (
        "the kind is left out",
        lambda spy: spy.kinds_missing,
        "An adapter x and a salt x would be the same key. Each key begins with what it is.",
    ),
    (
        "no keys is an empty list",
        lambda spy: [] in spy.keys,
        "Nothing is written as None. An empty list has other bytes, and so another hash.",
    ),
)


def compare_chain(
    block_hashes: Callable[..., Any], report: Report, what: str, tokens: list[int], **keys: Any
) -> None:
    """Wants the chain of the engine, block size 4. Names the misconception if it is a known one."""
    spy = Spy(4, keys.get("adapter"), keys.get("cache_salt"))
    got = block_hashes(tokens, 4, START, spy, **keys)
    report.true(
        isinstance(got, (list, tuple)), f"It should return a list of hashes; it returned {short(got)!r}."
    )
    expected = reference(tokens, 4, **keys)
    if list(got) != expected and spy.keys:
        for name, shows, why in MISREADINGS:
            if shows(spy):
                report.misconception(name, why)
    report.equal(short(expected), short(got), what)


def check_block_hashes(block_hashes: Callable[..., Any], report: Report) -> None:
    compare = partial(compare_chain, block_hashes, report)
    eight, twelve = list(range(1, 9)), list(range(1, 13))
    with report.case("full blocks only"):
        for count in (8, 7, 4, 3, 0):
            compare(f"hashes of {count} tokens", eight[:count])
    with report.case("each block hashes the hash of the one before it"):
        compare("hashes of 1 to 12", twelve)
        compare("the same tokens in every block", [7] * 12)
    with report.case("S23: an adapter by kind, name and path, in every block"):
        compare("with an adapter", twelve, adapter=LEGAL)
        compare("the same name at another path", twelve, adapter=Adapter("legal", "adapters/legal-v2", 7))
    with report.case("S23: a salt by kind, in the first block only"):
        compare("with a salt", twelve, cache_salt="acme")
    with report.case("S23: an empty salt is none"):
        compare("with the salt ''", twelve, cache_salt="")
    with report.case("S23: adapter and salt together, the adapter first"):
        compare("with both", twelve, adapter=LEGAL, cache_salt="acme")
    with report.case("the chains that vLLM recorded"):
        for request in recording("hashes")["algorithms"][ALGORITHM]["requests"]:
            if request["hash_lookahead_tokens"]:
                continue
            keys = {"adapter": adapter_of(request["lora"]), "cache_salt": request["cache_salt"]}
            got = block_hashes(request["token_ids"], request["block_size"], START, sha256_cbor, **keys)
            what = f"{len(request['token_ids'])} tokens, block size {request['block_size']}"
            report.equal(request["digests_hex"], [digest.hex() for digest in got], what)
    for name in ("script_cache_salt", "script_lora_keys"):
        with report.case(f"which requests share, as recorded: {name}"):
            numbers: dict[bytes, int] = {}
            for op in recording(name)["ops"]:
                if op["op"] != "new_request":
                    continue
                keys = {"adapter": adapter_of(op.get("lora")), "cache_salt": op.get("cache_salt")}
                got = block_hashes(op["prompt"], 4, START, sha256_cbor, **keys)
                named = [numbers.setdefault(digest, len(numbers)) for digest in got]
                report.equal(op["expect"]["hashes"], named, f"hashes of request {op['id']}, by number")


# -- 02.3 what shares -------------------------------------------------------------------------------------------

ADA = list(range(1, 13))
BESIDE_ADA: tuple[tuple[str, list[int], str | None], ...] = (
    ("a longer prompt", [*ADA, 13, 14], None),
    ("the first ten tokens", ADA[:10], None),
    ("token 8 is 99", [1, 2, 3, 4, 5, 6, 7, 99, 9, 10, 11, 12], None),
    ("without the first four tokens", ADA[4:], None),
    ("the salt ''", ADA, ""),
    ("the salt acme", ADA, "acme"),
)
BESIDE_LEGAL = (
    ("another number", Adapter("legal", "adapters/legal-v1", 9)),
    ("another path", Adapter("legal", "adapters/legal-v2", 7)),
)
WRONG_BLOCKS: dict[str, tuple[int, str, str]] = {
    "the first ten tokens": (
        3,
        "a partial block is shared",
        "The third block holds two of four tokens and has no hash.",
    ),
    "token 8 is 99": (
        2,
        "tokens without their past",
        "The third block has Ada's tokens and another parent. Nothing behind the first difference is shared.",
    ),
    "without the first four tokens": (
        2,
        "tokens without their past",
        "Ada's second and third block have parents. Here the same tokens come first and have none.",
    ),
    "the salt ''": (0, "an empty salt is a salt", "No key is made of an empty salt."),
    "the salt acme": (
        2,
        "a salt ends with its block",
        "Only the first block gets the salt, but it is the parent of the second, and so on.",
    ),
    "another number": (0, "the adapter by its number", "The number is not part of the key."),
    "another path": (3, "the adapter by its name alone", "The path is part of the key."),
}


def common(one: list[bytes], other: list[bytes]) -> int:
    return len(set(one) & set(other))


def check_sharing(shared_with_ada: list[int], shared_with_legal: list[int], report: Report) -> None:
    expected = [common(reference(ADA, 4), reference(t, 4, None, salt)) for _, t, salt in BESIDE_ADA]
    compare_each([what for what, _, _ in BESIDE_ADA], expected, shared_with_ada, "Ada", report)
    with_legal = reference(ADA, 4, LEGAL)
    expected = [common(with_legal, reference(ADA, 4, adapter)) for _, adapter in BESIDE_LEGAL]
    compare_each([what for what, _ in BESIDE_LEGAL], expected, shared_with_legal, "Lea", report)


def compare_each(names: list[str], expected: list[int], got: list[int], whom: str, report: Report) -> None:
    with report.case(f"one number for each request beside {whom}"):
        report.equal(len(expected), len(got), "how many numbers")
    for what, want, have in zip(names, expected, got, strict=False):
        with report.case(f"blocks shared with {whom}: {what}"):
            known = (WRONG_BLOCKS[what],) if what in WRONG_BLOCKS else ()
            report.equal(want, have, what, known=known)


# -- 02.4 a key that is too small -------------------------------------------------------------------------------


def check_keys(extra_keys: Callable[..., Any], report: Report) -> None:
    old, new = LEGAL, Adapter("legal", "adapters/legal-v2", LEGAL.adapter_id)
    planted = extra_keys(True, old, None) == (("lora", "legal"),)
    with report.case("a name that is pointed at another path has other keys"):
        for first in (True, False):
            got = [extra_keys(first, adapter, None) for adapter in (old, new)]
            if got[0] == got[1]:
                number_in(got[0], report)
                if planted:
                    report.as_given()
            report.true(got[0] != got[1], f"legal-v1 and legal-v2 have the same keys: {got[0]}.")
    with report.case("the same adapter under another number has the same keys"):
        got = [extra_keys(True, Adapter(old.name, old.path, number), None) for number in (1, 2)]
        number_in(got[0], report, (1, 2))
        report.equal(got[0], got[1], "keys with the number 2")
    with report.case("name and path stay apart"):
        got = [extra_keys(True, Adapter(*both), None) for both in (("law", "s/v1"), ("laws", "/v1"))]
        if got[0] == got[1]:
            report.misconception(
                "name and path run together",
                "law + s/v1 and laws + /v1 are the same text. They have to be two parts of the key.",
            )
        report.true(got[0] != got[1], f"law at s/v1 and laws at /v1 have the same keys: {got[0]}.")
    with report.case("an adapter is never a salt"):
        keys = extra_keys(True, Adapter("cache_salt", "acme"), None), extra_keys(True, None, "acme")
        if keys[0] == keys[1] or "lora" not in flat(keys[0]):
            report.misconception(
                "the kind is left out",
                "An adapter of the name cache_salt at the path acme has the key of the salt acme.",
            )
        report.true(keys[0] != keys[1], f"An adapter and a salt have the same keys: {keys[0]}.")
    with report.case("the salt stays where it was"):
        report.equal((("cache_salt", "acme"),), extra_keys(True, None, "acme"), "keys of the first block")
        report.equal(None, extra_keys(False, None, "acme"), "keys of the second block")
    with report.case("vLLM 0.33.0's digest of a block with an adapter, and with both"):
        for block in recording("hashes")["algorithms"][ALGORITHM]["blocks"]:
            if block["note"] in ("lora", "lora and salt"):
                salt = "tenant-1" if "salt" in block["note"] else None
                keys = extra_keys(True, Adapter("x", "adapters/x", 3), salt)
                digest = sha256_cbor(START, block["token_ids"], keys)
                report.equal(block["digest_hex"][:DIGITS], digest.hex()[:DIGITS], block["note"])


def number_in(keys: Any, report: Report, numbers: Sequence[int] = (LEGAL.adapter_id,)) -> None:
    if any(number in flat(keys) for number in numbers):
        report.misconception(
            "the adapter by its number",
            "The number says where an adapter is kept. The next adapter in that place has the same one.",
        )


# -- 02.5 collisions and processes ------------------------------------------------------------------------------


def constant(parent: bytes, token_ids: Sequence[int], extra: Any) -> bytes:
    return bytes(32)


def check_collisions(
    trusting: int, comparing: int, processes: list[bool], sixteen_bits: int, report: Report
) -> None:
    eight, others = list(range(1, 9)), [50, 51, 52, 53, 54]
    with report.case("S25: one hash for everything, and an engine that believes it"):
        report.equal(
            hit(constant, eight, others),
            trusting,
            "hit, in tokens",
            known=(
                (
                    0,
                    "the engine compares tokens",
                    "vLLM looks a block up by its hash and compares nothing else. The first block is a hit.",
                ),
                (5, "all tokens", "One token has to be left to compute, and hits are whole blocks."),
                (1, "blocks, not tokens", "One block is a hit; a hit is told in tokens."),
            ),
        )
    with report.case("S25: the same hash, and an engine that compares the tokens too"):
        known = ((4, "comparing is of no use", "50 51 52 53 are not 1 2 3 4, and this engine looks."),)
        report.equal(0, comparing, "hit, in tokens", known=known)
    with report.case("S26: two processes, three ways"):
        report.equal(3, len(processes), "how many answers")
        why = "Python's hash() of a text has a secret of its process in it, unless PYTHONHASHSEED pins it."
        report.equal(False, processes[0], "(a)", known=((True, "hash() is the same everywhere", why),))
        why = "All that goes in is the same in both, so the digest is."
        report.equal(True, processes[1], "(b)", known=((False, "SHA-256 has a secret", why),))
        why = "The start value is the parent of the first block, and every block hangs on it."
        report.equal(False, processes[2], "(c)", known=((True, "the start value does not matter", why),))
    with report.case("16-bit hashes: how many blocks until two have the same one"):
        why = "A new block may collide with any of the earlier ones: the pairs count, and they grow with the square."
        per_block = tuple((wrong, "one try per block", why) for wrong in (32768, 65536))
        report.equal(321, sixteen_bits, "blocks, on average", known=per_block)


# -- 02.6 what it costs -----------------------------------------------------------------------------------------


def count_bytes(token_ids: Sequence[int], block_size: int) -> int:
    counted = 0

    def spy(parent: bytes, tokens: tuple[int, ...], extra: Any) -> bytes:
        nonlocal counted
        counted += len(cbor2.dumps((parent, tokens, extra), canonical=True))
        return sha256_cbor(parent, tokens, extra)

    BlockHasher(ALGORITHM, block_size, SEED, hash_block=spy).extend([], token_ids)
    return counted


def check_cost(
    bytes_hashed: Callable[[list[int], int], int], dearest: int, dearer: str, report: Report
) -> None:
    for count, size in ((1024, 1), (1024, 16), (1024, 64), (23, 4), (3, 4)):
        with report.case(f"bytes hashed for {count} tokens, block size {size}"):
            tokens = [i % 20 for i in range(count)]
            full = count // size * size
            blocks = [tokens[i : i + size] for i in range(0, full, size)]
            alone = sum(len(cbor2.dumps(block)) for block in blocks)
            again = sum(len(cbor2.dumps((START, tokens[: i + size], None))) for i in range(0, full, size))
            known = (
                (alone, "only the tokens", "The parent's 32 bytes and the keys are hashed with every block."),
                (
                    again,
                    "the prefix again and again",
                    "A block hashes its parent's hash, not all tokens before it.",
                ),
                (
                    count_bytes(tokens, size) + len(cbor2.dumps((START, tokens[full:], None))),
                    "a partial block is hashed",
                    "What is left over at the end fills no block and has no hash.",
                ),
            )
            report.equal(count_bytes(tokens, size), bytes_hashed(tokens, size), "bytes", known=known)
    with report.case("the block size that costs most to hash"):
        why = "A larger block is a longer input, but there are fewer of them, and each brings the parent's 34 bytes."
        larger = tuple((size, "large blocks cost more", why) for size in (64, 16, 4))
        report.equal(1, dearest, "dearest", known=larger)
    with report.case("hashing a prompt against looking its blocks up"):
        why = "A lookup is one step in a dictionary per block. The bytes are made and digested before it."
        report.equal(
            "hashing", dearer.strip().lower(), "dearer", known=(("lookup", "the lookup is dearer", why),)
        )


# -- 02.7 where it is -------------------------------------------------------------------------------------------


def expected_places() -> dict[str, str]:
    """The answers, read from the code map."""
    block, keys = topic("block_hash"), topic("extra_keys")
    path = {(step.component, step.place.symbol) for name in ("v0", "v1") for step in call_path(name)}
    wanted = {
        "v1_one_block": next(p.symbol for p in block.v1.vllm if p.symbol == "hash_block_tokens"),
        "v0_one_block": next(p.symbol for p in block.v0.vllm if p.symbol.endswith("hash_block_tokens")),
        "v1_more_tokens": next(symbol for part, symbol in path if part == "request"),
        "v0_adapter": keys.v0.vllm[0].symbol,
        "v1_find": next(symbol for _, symbol in path if symbol == "BlockPool.get_cached_block"),
        "v0_find": next(symbol for _, symbol in path if symbol.endswith("find_cached_blocks_prefix")),
    }
    return wanted


def check_places(*answers_and_report: Any) -> None:
    *answers, report = answers_and_report
    wanted = expected_places()
    partner = {
        name: wanted[f"v{1 - int(name[1])}{name[2:]}"] for name in wanted if name.endswith(("block", "find"))
    }
    for (name, symbol), answer in zip(wanted.items(), answers, strict=True):
        with report.case(name):
            got = answer.strip().removesuffix("()")
            known: tuple[tuple[str, str, str], ...] = ()
            if name in partner:
                why = f"That is the one of V{1 - int(name[1])}."
                known = ((partner[name], "the other generation", why),)
            full = (
                symbol
                if "." not in got and got == symbol.rpartition(".")[2] and name != "v0_one_block"
                else got
            )
            report.equal(symbol, full, name, known=known)
