"""The layer with a recurrent state: its arithmetic against the definition, and its blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from refengine.attention import AttentionMetadata, causal_attention
from refengine.kv_cache import KVCache
from refengine.model.linear_attention import PIECE, State, recurrence, start_state
from refengine.model.uncached import recur_rows
from refengine.recurrence import PagedRecurrence
from tests.unit.hybrid_models import make_hybrid

CONFIG = make_hybrid().config
HEADS, DIM, WIDTH = CONFIG.num_heads, CONFIG.head_dim, CONFIG.conv_width
Inputs = tuple[Tensor, Tensor, Tensor]


def draw(n: int, num_tokens: int, seed: int = 0) -> Inputs:
    """mixed, log_decay, conv_weight."""
    torch.manual_seed(seed)
    log_decay = F.logsigmoid(torch.randn(n, num_tokens, HEADS) + 3.0)
    return torch.randn(n, num_tokens, 3 * HEADS * DIM), log_decay, torch.randn(3 * HEADS * DIM, WIDTH)


def by_definition(mixed: Tensor, log_decay: Tensor, conv_weight: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence, token by token, head by head: outputs `[num_tokens, heads * dim]` and the last matrices."""
    padded = torch.cat((torch.zeros(WIDTH - 1, mixed.shape[1]), mixed))
    matrices, outputs = torch.zeros(HEADS, DIM, DIM), []
    for t in range(len(mixed)):
        features = F.silu((padded[t : t + WIDTH] * conv_weight.T).sum(0))
        q, k, v = features.view(3, HEADS, DIM)
        heads = []
        for head in range(HEADS):
            key, query = F.normalize(k[head], dim=0), F.normalize(q[head], dim=0)
            matrices[head] = log_decay[t, head].exp() * matrices[head] + torch.outer(key, v[head])
            heads.append(query @ matrices[head])
        outputs.append(torch.cat(heads))
    return torch.stack(outputs), matrices


@pytest.mark.parametrize("num_tokens", [1, 2, 5, PIECE, 2 * PIECE + 3])
def test_pieces_give_what_the_definition_says(num_tokens: int) -> None:
    mixed, log_decay, conv_weight = draw(2, num_tokens)
    out, state = recurrence(mixed, log_decay, conv_weight, start_state(CONFIG, 2))
    for row in range(2):
        expected, matrices = by_definition(mixed[row], log_decay[row], conv_weight)
        torch.testing.assert_close(out[row], expected, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(state.matrix[row], matrices, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("chunks", [[1] * 40, [7, 1, 1, 13, 18], [39, 1], [1, 39], [2, 38]])
def test_a_state_is_all_that_the_next_chunk_needs(chunks: list[int]) -> None:
    """Misconception: "the state is the matrix". Without the convolution's last inputs the next tokens differ."""
    mixed, log_decay, conv_weight = draw(1, 40)
    whole, end = recurrence(mixed, log_decay, conv_weight, start_state(CONFIG, 1))
    state, outs, done = start_state(CONFIG, 1), [], 0
    for size in chunks:
        rows = slice(done, done + size)
        out, state = recurrence(mixed[:, rows], log_decay[:, rows], conv_weight, state)
        outs.append(out)
        done += size
    torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.matrix, end.matrix, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.tail, end.tail)
    forgot, _ = recurrence(
        mixed[:, 20:], log_decay[:, 20:], conv_weight, start_state(CONFIG, 1)._replace(matrix=end.matrix)
    )
    assert not torch.allclose(forgot, whole[:, 20:], atol=1e-2)


def test_a_whole_past_does_not_change_its_state_in_place() -> None:
    """Others may start from it, too."""
    mixed, log_decay, conv_weight = draw(1, 9)
    _, state = recurrence(mixed, log_decay, conv_weight, start_state(CONFIG, 1))
    before = State(*(part.clone() for part in state))
    recurrence(mixed, log_decay, conv_weight, state)
    assert torch.equal(before.matrix, state.matrix) and torch.equal(before.tail, state.tail)


def test_a_long_fade_is_not_a_number_too_small() -> None:
    """Misconception: "a decay is a number". It is a product that soon is too small for one; its log is a sum.

    And each token of a piece has faded only since it came.
    """
    mixed, log_decay, conv_weight = draw(1, PIECE)
    out, state = recurrence(mixed, log_decay - 50.0, conv_weight, start_state(CONFIG, 1))
    assert out.isfinite().all() and state.matrix.isfinite().all()
    expected, matrices = by_definition(mixed[0], log_decay[0] - 50.0, conv_weight)
    torch.testing.assert_close(out[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.matrix[0], matrices, atol=1e-4, rtol=1e-4)


def test_a_model_with_such_layers_says_that_it_needs_recur() -> None:
    with pytest.raises(TypeError, match="give `recur`"):
        make_hybrid()(torch.arange(3), torch.arange(3), causal_attention)


# -- states in blocks ---------------------------------------------------------------------------------------


def metadata(tables: list[list[int]], starts: list[int], lengths: list[int]) -> AttentionMetadata:
    rows = starts[-1]
    return AttentionMetadata(
        torch.zeros(rows, dtype=torch.int64),
        torch.tensor(tables),
        torch.tensor(starts),
        torch.tensor(lengths),
    )


def test_sequences_of_all_kinds_in_one_step() -> None:
    """Misconception: "the state is in the newest block". It is in the block of the last computed token, and the
    one after this step in that of the step's last token. Here are two prompts, a decode in place, a chunk that goes
    on in another block, and a row of padding.
    """
    cache, (mixed, log_decay, conv_weight) = KVCache(CONFIG, 12, 4), draw(1, 40)
    flat = mixed[0], log_decay[0]
    first = metadata([[3, 0, 0], [0, 7, 0]], [0, 3, 11], [3, 8])
    second = metadata([[3, 0, 0], [0, 7, 8], [9, 0, 0]], [0, 1, 4, 8], [4, 11, 4])
    texts = [(0, 3, 30, 31), (3, 11, 31, 34), (34, 38, 38, 38)]  # rows of each sequence in both steps
    PagedRecurrence(cache, first)(0, flat[0][:11], flat[1][:11], conv_weight)
    kept = [part[7].clone() for part in cache.layers[0]]
    padded = torch.cat((flat[0][30:38], flat[0][:1])), torch.cat((flat[1][30:38], flat[1][:1]))
    out = PagedRecurrence(cache, second)(0, *padded, conv_weight)
    assert out[8:].count_nonzero() == 0
    found = []
    for a, b, c, d in texts:
        rows = [*range(a, b), *range(c, d)]
        whole = recur_rows(CONFIG)(0, flat[0][rows], flat[1][rows], conv_weight)
        found.append(whole[b - a :] if c < d else whole)
    torch.testing.assert_close(out[:8], torch.cat(found), atol=1e-4, rtol=1e-4)
    assert all(torch.equal(part[7], old) for part, old in zip(cache.layers[0], kept, strict=True))
    assert not cache.layers[0][0][0].any(), "the null block is nobody's state"


def test_the_first_token_starts_from_nothing_whatever_its_block_holds() -> None:
    """Misconception: "a new block is empty". It holds what its last owner left there."""
    mixed, log_decay, conv_weight = draw(1, 5)
    outs = []
    for left in (0.0, 1e6):
        cache = KVCache(CONFIG, 6, 4)
        for part in cache.layers[0]:
            part.fill_(left)
        outs.append(
            PagedRecurrence(cache, metadata([[0, 2]], [0, 5], [5]))(0, mixed[0], log_decay[0], conv_weight)
        )
    assert torch.equal(*outs)
