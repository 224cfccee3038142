"""Misconceptions about Gemma, and about what a GGUF file holds."""

from __future__ import annotations

from tests.mutants.world import Mutant

GEMMA = (
    Mutant(
        "a norm's weight is its factor",
        "model.layers",
        "1 + self.weight.float()",
        "self.weight.float()",
        ("test_gemma::test_a_norm_that_learned_nothing_keeps_the_size",),
    ),
    Mutant(
        "the norm's result is rounded before it is multiplied",
        "model.layers",
        "F.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), self.eps).to(x.dtype)",
        "F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * (1 + self.weight).to(x.dtype)",
        ("test_gemma::test_the_norm_multiplies_before_it_rounds",),
    ),
    Mutant(
        "the embedding's scale is exact",
        "model.decoder",
        "torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()",
        "self.config.embedding_scale",
        ("test_gemma::test_the_embedding_is_scaled_by_a_rounded_number",),
    ),
    Mutant(
        "the MLP's output is added as it is",
        "model.decoder",
        "x + self.post_feedforward_layernorm(out)",
        "x + out",
        ("test_gemma::test_what_is_added_back_is_normalised_too",),
    ),
    Mutant(
        "all layers turn by one base",
        "model.decoder",
        "self.turn = SLIDING_ATTENTION if own_turn else FULL_ATTENTION",
        "self.turn = FULL_ATTENTION",
        ("test_gemma::test_sliding_layers_turn_by_their_own_base",),
    ),
    Mutant(
        "Llama's features that turn together lie half a head apart in a GGUF file too",
        "model.gguf_checkpoint",
        "pairs.transpose(1, 2).reshape(tensor.shape)",
        "tensor",
        ("test_gguf_checkpoint::test_llamas_halves_are_put_apart_again",),
    ),
    Mutant(
        "Gemma's norms are stored in a GGUF file as they were trained",
        "model.gguf_checkpoint",
        "return tensor - 1",
        "return tensor",
        ("test_gguf_checkpoint::test_gemmas_norms_lose_their_one",),
    ),
)
