"""The CPU backend against the definition in `oracle`, and what it promises beyond being right."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import cpu
from kernels.cpu.attention import AHEAD, BUILT_FROM, QUERIES, TILE
from kernels.cpu.vectors import LANES
from tests.kernels.oracle import MIXES, Pages, make_pages

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Around the edges of tiles, blocks of queries and what is fetched ahead.
LONG = [
    (1, TILE),
    (1, TILE + 1),
    (1, 3 * TILE - 1),
    (QUERIES + 1, 2 * TILE + 5),
    (3, TILE + AHEAD),
    (TILE, TILE),
]


def attention(pages: Pages, window: int | None = None) -> torch.Tensor:
    return kernels.paged_attention(*pages.arguments, sliding_window=window, backend="cpu")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_it_is_what_a_cpu_gets() -> None:
    assert kernels.backend_for("cpu") is kernels.backend_for("cpu", "cpu")
    assert kernels.BACKENDS["cpu"] == "kernels.cpu"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("head_dim", [LANES, 64, 8, 40])
def test_types(dtype: torch.dtype, head_dim: int) -> None:
    """In place, in place again, and copied by tiles because it does not fill whole vectors."""
    pages = make_pages(LONG[:4], 16, head_dim=head_dim, dtype=dtype)
    out = attention(pages)
    assert out.dtype == dtype
    close(out, pages.expected())


@pytest.mark.parametrize("sharing", range(1, 14))
def test_heads_that_share_a_key(sharing: int) -> None:
    pages = make_pages(MIXES["chunks"], 4, num_heads=2 * sharing, num_kv_heads=2, head_dim=32)
    close(attention(pages), pages.expected())


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "sizes"), [(8, 2, [4, 4]), (7, 1, [4, 2, 1]), (24, 1, [8] * 3)]
)
def test_groups_of_heads(num_heads: int, num_kv_heads: int, sizes: list[int]) -> None:
    groups = cpu.head_groups(num_heads, num_kv_heads)
    assert groups[:, 1].tolist() == sizes
    assert groups[:, 0].tolist() == [sum(sizes[:i]) for i in range(len(sizes))]
    assert (groups[:, 2] == groups[:, 0] // (num_heads // num_kv_heads)).all()


@pytest.mark.parametrize("block_size", [3, 16, TILE, 100])
@pytest.mark.parametrize("window", [None, 1, 17, TILE, TILE + 1, 1000])
def test_edges_of_tiles(block_size: int, window: int | None) -> None:
    pages = make_pages(LONG, block_size, num_heads=2, num_kv_heads=1, head_dim=LANES)
    close(attention(pages, window), pages.expected(window))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3 * TILE)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 5, 8, 16, 32]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (8, 1)]),
    head_dim=st.sampled_from([1, LANES, 3 * LANES, 64, 80]),
    window=st.one_of(st.none(), st.integers(1, 2 * TILE)),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    lengths: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    seed: int,
) -> None:
    lengths = [(query_len, query_len + context) for query_len, context in lengths]
    pages = make_pages(lengths, block_size, *heads, head_dim, seed=seed)
    close(attention(pages, window), pages.expected(window))


@pytest.mark.parametrize("window", [None, 40])
def test_a_token_gets_the_same_to_the_last_bit_in_every_batch(window: int | None) -> None:
    length = 2 * TILE + 9
    whole = make_pages([(length, length), (1, 30)], 16, head_dim=32)
    at_once = attention(whole, window)
    for size in (1, 7, TILE):
        parts = []
        for first in range(0, length, size):
            last = min(first + size, length)
            parts.append(
                kernels.paged_attention(
                    whole.query[first:last],
                    whole.key_cache,
                    whole.value_cache,
                    whole.block_tables[:1],
                    torch.tensor([0, last - first]),
                    torch.tensor([last]),
                    whole.scale,
                    window,
                    backend="cpu",
                )
            )
        assert torch.equal(torch.cat(parts), at_once[:length])


@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_scores_of_any_size(size: float) -> None:
    """Far apart, all weights but one vanish; a softmax without its correction overflows."""
    pages = make_pages([(1, 3 * TILE), (5, 2 * TILE)], 16, head_dim=LANES)
    pages.query *= size
    close(attention(pages), pages.expected())


def test_rising_scores_correct_every_tile() -> None:
    pages = make_pages([(1, 4 * TILE)], 16, num_heads=2, num_kv_heads=2, head_dim=LANES)
    pages.query[:] = 1.0
    for position in range(4 * TILE):
        block = pages.block_tables[0, position // 16]
        pages.key_cache[block, position % 16] = pages.keys[0][position] = position / 40
    close(attention(pages), pages.expected())


def test_a_value_that_is_no_number_is_not_hidden() -> None:
    pages = make_pages([(1, 9), (1, 5)], head_dim=LANES)
    pages.key_cache[pages.block_tables[0, 1], 2] = torch.nan
    out = attention(pages)
    assert out[0].isnan().all() and not out[1].isnan().any()


@pytest.mark.parametrize(
    "bits", [0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x8001, 0x8000]
)
def test_every_kind_of_float16(bits: int) -> None:
    """With one token in the cache the result is its value: below the smallest normal one, infinite, no number."""
    pages = make_pages([(1, 1)], head_dim=1, num_heads=1, num_kv_heads=1, dtype=torch.float16)
    value = torch.tensor([bits], dtype=torch.int32).to(torch.uint16).view(torch.float16)
    pages.value_cache[pages.block_tables[0, 0], 0] = value
    torch.testing.assert_close(attention(pages).flatten(), value, rtol=0, atol=0, equal_nan=True)


def test_types_that_are_not_attended_over() -> None:
    pages = make_pages([(1, 3)], dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"the cpu backend attends over float32, .*, not complex64"):
        attention(pages)


# Compiling


def test_the_cache_on_disk_notices_a_change_of_every_file() -> None:
    """Numba looks at the file of the cached function only, so that file has to change with the others."""
    folder = Path(cpu.__file__).parent
    parts = [path for path in sorted(folder.glob("*.py")) if path.name not in ("__init__.py", "attention.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()[:16]
    assert digest == BUILT_FROM, f"write {digest!r} into BUILT_FROM of kernels/cpu/attention.py"


class Terminal(io.StringIO):
    """What is printed, and whether anybody sees it."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_first_call_says_why(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: object) -> None:
        if sys.stderr.isatty():
            while not words.getvalue():  # the word comes from another thread
                pass

    words = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", words)
    monkeypatch.setattr(cpu, "attend", slow)
    monkeypatch.setattr(cpu, "PATIENCE", 0.0)
    monkeypatch.setattr(cpu, "_compiled", set())
    cpu.first_call(torch.float32)
    cpu.first_call(torch.float32)
    expected = "compiling attention over float32 for this CPU, once per machine ...\n" if is_terminal else ""
    assert words.getvalue() in (expected, 2 * expected)
    assert cpu._compiled == {torch.float32}


def test_importing_the_engine_does_not_import_the_compiler() -> None:
    code = "import sys, refengine, kernels; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
