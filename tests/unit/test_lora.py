"""Adapters: the right change, for the right tokens, with the right blocks, and a sentence for what is no adapter."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from refengine import LLM
from refengine.attention import causal_attention
from refengine.config import EngineConfig
from refengine.errors import CheckpointError, ConfigError, RequestError
from refengine.hashing import Adapter
from refengine.model.decoder import Adapt, Decoder
from refengine.model.lora import LoadedAdapters, load_lora, write_example_adapter
from refengine.model.lora_loader import CONFIG, WEIGHTS
from refengine.parts import Parts
from refengine.sampling import SamplingParams
from refengine.v0 import block, tracker
from refengine.v0.engine import LLMEngine
from refengine.v1.engine import EngineCore
from refengine.v1.input_batch import InputBatch
from refengine.v1.scheduler_output import ScheduledRequest
from tests.unit import helpers
from tests.unit.helpers import numbers
from tests.unit.models import greedy, make_decoder, make_tokenizer, merge_adapter, save_model

HOME = tempfile.TemporaryDirectory()
SEEDS = {"poet": 1, "lawyer": 2}
ENGINES: dict[str, type[Any]] = {"v1": EngineCore, "v0": LLMEngine}
Q_PROJ_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
SHARED = numbers(1, 13)  # three blocks and one token

Requests = dict[str, tuple[Sequence[int], Adapter | None]]


@cache
def adapter(name: str) -> Adapter:
    directory = Path(HOME.name) / name
    return Adapter(name, write_example_adapter(directory, make_decoder().config, SEEDS.get(name, 3)))


def make(generation: str = "v1", parts: Parts | None = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 65, "hash_seed": "0"}
    config = EngineConfig(
        engine=generation, **(defaults | {"check_integrity": helpers.CHECK_INTEGRITY} | options)
    )
    return ENGINES[generation](config, make_decoder(), parts=parts)


def serve(
    engine: Any, requests: Requests, max_tokens: int = 6
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """All requests in one batch, to their end. Returns: what each says, and how much of each was cached."""
    for request_id, (prompt, its_adapter) in requests.items():
        engine.add_request(request_id, prompt, SamplingParams(max_tokens=max_tokens), adapter=its_adapter)
    return finish(engine)


def finish(engine: Any) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Steps until nothing is left. Returns: as `serve`."""
    tokens: dict[str, list[int]] = {}
    cached = {}
    for _ in range(200):
        if not engine.has_unfinished_requests:
            return tokens, cached
        for step in engine.step():
            tokens.setdefault(step.request_id, []).extend(step.token_ids)
            cached[step.request_id] = step.num_cached_tokens
    raise AssertionError("the engine did not come to an end within 200 steps")


@cache
def right(name: str | None, prompt: tuple[int, ...], max_tokens: int = 6) -> list[int]:
    """What the network says with the adapter merged into its weights, without an engine and without a cache."""
    network = make_decoder() if name is None else merge_adapter(make_decoder(), adapter(name).path)
    return greedy(network, prompt, max_tokens)


def truth(requests: Requests) -> dict[str, list[int]]:
    return {rid: right(its and its.name, tuple(prompt)) for rid, (prompt, its) in requests.items()}


# The change itself


def network(family: str) -> Decoder:
    """A random network of another family than `make_decoder` gives: without the norms of Q and K, or with biases."""
    config = replace(
        make_decoder().config, family=family, qk_norm=family == "qwen3", qkv_bias=family == "qwen2"
    )
    decoder, generator = Decoder(config), torch.Generator().manual_seed(5)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return decoder.eval().requires_grad_(False)


@torch.inference_mode()
def logits(decoder: Decoder, adapt: Adapt | None = None) -> Tensor:
    token_ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
    return decoder.logits(decoder(token_ids, torch.arange(len(token_ids)), causal_attention, adapt))


def rewrite(path: str, **options: Any) -> None:
    """Changes the adapter's options, and drops the tensors of projections that are no longer targets."""
    file, weights = Path(path) / CONFIG, Path(path) / WEIGHTS
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    targets = json.loads(file.read_text())["target_modules"]
    save_file({name: x for name, x in load_file(weights).items() if name.split(".")[6] in targets}, weights)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_alpha": 10},
        {"lora_alpha": 3, "use_rslora": True},
        {"target_modules": ["v_proj", "q_proj"]},
        {"target_modules": ["k_proj"]},
        {"target_modules": ["o_proj"]},
    ],
    ids=str,
)
def test_an_adapter_is_its_product_added_to_the_weights(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    decoder = network(family)
    path = write_example_adapter(tmp_path, decoder.config, 1, strength=0.3)
    rewrite(path, **options)
    adapt = LoadedAdapters(decoder).for_requests([Adapter("a", path)], [11])
    expected = logits(merge_adapter(decoder, path))
    assert torch.allclose(logits(decoder, adapt), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(decoder), expected, atol=1e-3)


def test_each_token_gets_the_change_of_its_own_adapter() -> None:
    """Misconception: "an adapter is a setting of the model". It is one of the request, and a batch may mix them."""
    poet, lawyer = adapter("poet"), adapter("lawyer")
    x, y = torch.randn(7, 32), torch.randn(7, 64)
    adapt = LoadedAdapters(make_decoder()).for_requests([lawyer, None, poet, lawyer], [2, 1, 3, 1])
    assert adapt is not None
    got = adapt(1, "qkv_proj", x, y.clone())
    for row, name in enumerate(["lawyer", "lawyer", None, "poet", "poet", "poet", "lawyer"]):
        expected = y[row].clone()
        tensors = load_file(Path(adapter(name).path) / WEIGHTS) if name else {}
        for target, first in (("q_proj", 0), ("k_proj", 32), ("v_proj", 48)) if name else ():
            prefix = f"base_model.model.model.layers.1.self_attn.{target}"
            a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
            expected[first : first + len(b)] += b @ (a @ x[row])
        assert torch.allclose(got[row], expected, atol=1e-5), row


def test_the_scale_is_alpha_over_rank() -> None:
    """Misconception: "B A is what is added". Training fixes alpha, so that the rank can change on its own."""
    with tempfile.TemporaryDirectory() as directory:
        config = make_decoder().config
        plain = load_lora(write_example_adapter(directory, config, 1), config)  # alpha is the rank: scale 1
        rewrite(directory, lora_alpha=12)
        thrice = load_lora(directory, config)
        rewrite(directory, use_rslora=True)
        stabilised = load_lora(directory, config)
    for scaled, factor in ((thrice, 3), (stabilised, 6)):
        assert torch.allclose(scaled.layers[0]["o_proj"].b, factor * plain.layers[0]["o_proj"].b)


def test_one_adapter_per_token_is_the_same() -> None:
    poet, lawyer = adapter("poet"), adapter("lawyer")
    loaded, x = LoadedAdapters(make_decoder()), torch.randn(5, 32)
    by_request = loaded.for_requests([poet, None, lawyer], [2, 2, 1])
    by_token = loaded.for_tokens([poet, poet, None, None, lawyer])
    assert by_request is not None and by_token is not None
    assert torch.equal(by_token(0, "o_proj", x, x.clone()), by_request(0, "o_proj", x, x.clone()))


def test_a_step_without_adapters_adapts_nothing() -> None:
    loaded = LoadedAdapters(make_decoder())
    assert loaded.for_requests([None, None], [3, 1]) is None
    assert loaded.for_tokens([None] * 4) is None


def test_the_weights_are_where_and_what_the_model_is() -> None:
    weights = load_lora(adapter("poet").path, make_decoder().config, torch.bfloat16)
    assert {x.dtype for change in weights.layers[0].values() for x in (change.a, change.b)} == {
        torch.bfloat16
    }


# In the engines


def test_a_batch_of_several_adapters_says_what_each_says_alone() -> None:
    """Misconception: "requests with different adapters need a step each". Only their tokens are kept apart."""
    poet, lawyer = adapter("poet"), adapter("lawyer")
    requests: Requests = {
        "A": (SHARED, poet),
        "B": (SHARED, None),
        "C": (SHARED, lawyer),
        "D": ([5, 4, 3], poet),
        "E": (numbers(2, 8), lawyer),
    }
    for generation in ENGINES:
        assert serve(make(generation), requests)[0] == truth(requests)
    said = truth(requests)
    assert said["A"] != said["B"] != said["C"] != said["A"]


@pytest.mark.parametrize("generation", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 6},
        {"num_blocks": 14},
        {"num_blocks": 14, "enable_prefix_caching": False, "max_num_batched_tokens": 6},
        {"max_num_seqs": 2},
        {"dtype": "float32", "hash_algorithm": "sha256_cbor"},
    ],
    ids=str,
)
def test_neither_chunks_nor_preemption_nor_caching_change_an_answer(
    generation: str, options: dict[str, Any]
) -> None:
    names: tuple[str | None, ...] = ("poet", None, "lawyer", "poet", "lawyer")
    requests: Requests = {
        f"R{i}": ([*SHARED, *numbers(i, 2 * i)], name and adapter(name)) for i, name in enumerate(names)
    }
    engine = make(generation, **options)
    for _ in range(2):  # the second time with whatever the first has left in the cache
        assert serve(engine, requests)[0] == truth(requests)


def test_v1_finds_the_blocks_of_one_adapter_only() -> None:
    """Misconception: "equal tokens, equal K/V". Seen from outside: what is found, and what is said with it."""
    _hits_stay_within_one_adapter("v1")


def test_v0_finds_the_blocks_of_one_adapter_only() -> None:
    _hits_stay_within_one_adapter("v0")


def _hits_stay_within_one_adapter(generation: str) -> None:
    engine, poet, lawyer = make(generation), adapter("poet"), adapter("lawyer")
    steps: list[tuple[Adapter | None, int]] = [
        (poet, 0),
        (lawyer, 0),
        (None, 0),
        (poet, 12),
        (lawyer, 12),
        (None, 12),
    ]
    for i, (its_adapter, num_cached) in enumerate(steps):
        request: Requests = {f"R{i}": (SHARED, its_adapter)}
        tokens, cached = serve(engine, request)
        assert (cached, tokens) == ({f"R{i}": num_cached}, truth(request))


def _digest(parent: bytes, token_ids: tuple[int, ...], extra: Any) -> bytes:
    return hashlib.sha256(parent + repr(token_ids).encode()).digest()


def test_without_the_adapter_in_the_key_v1_answers_with_anothers_kv() -> None:
    _answers_with_anothers_kv(make("v1", Parts(hash_block=_digest)))


def test_without_the_adapter_in_the_key_v0_answers_with_anothers_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    def content_hash(parent: int | None, token_ids: Sequence[int], extra: Any = None) -> int:
        return hash((parent, tuple(token_ids)))

    for module in (block, tracker):
        monkeypatch.setattr(module, "content_hash", content_hash)
    _answers_with_anothers_kv(make("v0"))


def _answers_with_anothers_kv(engine: Any) -> None:
    """The poet's blocks are found for the lawyer, who then says neither what he nor what the poet would say."""
    serve(engine, {"A": ([*SHARED, 1], adapter("poet"))})
    request: Requests = {"B": ([*SHARED, 1], adapter("lawyer"))}
    tokens, cached = serve(engine, request)
    assert cached == {"B": 12}
    assert tokens != truth(request)
    engine.reset_prefix_cache()
    assert serve(engine, request)[0] == truth(request)


def test_the_adapter_moves_with_its_row() -> None:
    """Misconception: "the adapter belongs to the row". A row is filled with another request when it falls free."""
    batch, params = InputBatch(max_num_seqs=4, max_model_len=12, block_size=4), SamplingParams()
    for name in ("poet", "lawyer"):
        batch.add(ScheduledRequest(name, "new", 1, 0, None, (1,), 1, params, adapter(name)))
    batch.remove("poet")
    assert batch.adapters == [adapter("lawyer")]


# What is loaded


def test_the_least_recently_used_adapter_is_dropped() -> None:
    adapters, loaded = [adapter(f"a{i}") for i in range(4)], LoadedAdapters(make_decoder(), capacity=3)
    for each in adapters[:3]:
        loaded.load("R", each)
    loaded.for_requests([adapters[0]], [1])
    loaded.load("R", adapters[3])
    assert [Path(path).name for path in loaded.paths] == ["a2", "a0", "a3"]


def test_an_adapter_in_use_is_not_dropped() -> None:
    """Misconception: "it can be read again". A request waits or runs for long, and its directory may be gone."""
    adapters, loaded = [adapter(f"a{i}") for i in range(4)], LoadedAdapters(make_decoder(), capacity=2)
    loaded.load("A", adapters[0])
    for each in adapters[1:]:
        loaded.load("R", each, in_use=[adapters[0], None])
    assert [Path(path).name for path in loaded.paths] == ["a0", "a3"]


@pytest.mark.parametrize("generation", ENGINES)
def test_more_adapters_than_are_kept_in_one_batch(tmp_path: Path, generation: str) -> None:
    """All of them run, even if their directories vanish after they were added."""
    engine, config = make(generation), make_decoder().config
    adapters = [Adapter(n, write_example_adapter(tmp_path / n, config, ord(n))) for n in "abcdefghij"]
    expected = {a.name: greedy(merge_adapter(make_decoder(), a.path), SHARED, 4) for a in adapters}
    for each in adapters:
        engine.add_request(each.name, SHARED, SamplingParams(max_tokens=4), adapter=each)
    shutil.rmtree(tmp_path)
    assert finish(engine)[0] == expected
    loaded = (engine.model_runner if generation == "v1" else engine.worker).adapters
    engine.add_request("last", SHARED, SamplingParams(), adapter=adapter("poet"))
    assert len(loaded.paths) == loaded.capacity == 8


# Bad adapters


def drop(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def options(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        options = json.loads((directory / CONFIG).read_text()) | changes
        (directory / CONFIG).write_text(json.dumps({k: v for k, v in options.items() if v != "absent"}))

    return change


def tensors(**changes: Tensor | None) -> Callable[[Path], None]:
    """`q_proj_a`: replaces the second layer's A of the query. None: leaves it out."""

    def change(directory: Path) -> None:
        left = load_file(directory / WEIGHTS) | {
            Q_PROJ_A if n == "q_proj_a" else n: x for n, x in changes.items()
        }
        save_file({name: x for name, x in left.items() if x is not None}, directory / WEIGHTS)

    return change


def only_pickle(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    torch.save({}, directory / "adapter_model.bin")


MLP = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
SUPPORTED = "supported are the attention projections q_proj, k_proj, v_proj, o_proj"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no directory": (lambda d: shutil.rmtree(d), "there is no adapter directory '.*bad'"),
    "no config": (drop(CONFIG), f"bad has no {CONFIG}"),
    "no JSON": (lambda d: (d / CONFIG).write_text("{") and None, f"{CONFIG} is not valid JSON"),
    "no rank": (options(r="absent"), f"{CONFIG} has no 'r'"),
    "rank": (options(r=0), "r must be a positive whole number, not 0"),
    "alpha": (options(lora_alpha="big"), "lora_alpha must be a number, not 'big'"),
    "another rank": (
        options(r=2),
        r"lora_A.weight' in .* is \[4, 32\], but with r 2 this model needs \[2, 32\]",
    ),
    "MLP": (options(target_modules=["q_proj", "up_proj"]), f"module 'up_proj' is not supported; {SUPPORTED}"),
    "pattern": (
        options(target_modules="all-linear"),
        f"must be a list of names, not 'all-linear'; {SUPPORTED}",
    ),
    "no targets": (options(target_modules=[]), "target_modules must be a list of names"),
    "nested": (options(target_modules=[["q_proj"]]), r"module \['q_proj'\] is not supported"),
    "DoRA": (options(use_dora=True), "use_dora True is not supported"),
    "bias": (options(bias="all"), "bias 'all' is not supported"),
    "heads": (options(modules_to_save=["lm_head"]), r"modules_to_save \['lm_head'\] is not supported"),
    "ranks": (options(rank_pattern={"q_proj": 8}), "rank_pattern .* is not supported"),
    "PiSSA": (options(init_lora_weights="pissa"), "init_lora_weights 'pissa' is not supported"),
    "prompt tuning": (options(peft_type="PROMPT_TUNING"), "peft_type 'PROMPT_TUNING' is not supported"),
    "no weights": (drop(WEIGHTS), f"has no {WEIGHTS}"),
    "pickle": (only_pickle, "only in adapter_model.bin, a pickle, which could run any code"),
    "damaged": (lambda d: (d / WEIGHTS).write_bytes(b"x" * 99) and None, "is not a whole safetensors file"),
    "missing": (tensors(q_proj_a=None), f"has no tensor '{Q_PROJ_A}'"),
    "shape": (tensors(q_proj_a=torch.zeros(4, 33)), rf"'{Q_PROJ_A}' .* is \[4, 33\], but .* needs \[4, 32\]"),
    "integers": (
        tensors(q_proj_a=torch.zeros(4, 32, dtype=torch.int8)),
        "is torch.int8; quantized adapters are",
    ),
    "too much": (
        tensors(**{MLP: torch.zeros(4, 32)}),
        f"has a tensor '{MLP}' that has no place in the model$",
    ),
    "untargeted": (options(target_modules=["v_proj"]), r"that has no place in the model \(and 11 more\)"),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    directory = str(save_model(tmp_path_factory.mktemp("models") / "random"))
    return {name: LLM(directory, engine=name, block_size=4, num_blocks=65) for name in ENGINES}


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return Path(write_example_adapter(tmp_path / "bad", make_decoder().config, 3))


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("generation", ENGINES)
def test_a_bad_adapter_gets_one_sentence_and_fails_alone(
    engines: dict[str, LLM], bad: Path, generation: str, case: str
) -> None:
    damage, sentence = DAMAGE[case]
    damage(bad)
    llm, adapters = engines[generation], [adapter("poet"), Adapter("bad", str(bad)), None]
    outputs = llm.generate(
        [SHARED] * 3, SamplingParams(max_tokens=6), adapter=adapters, request_ids=list("ABC")
    )
    error = outputs[1].error
    assert error is not None and error.request_id == "B"
    with pytest.raises(RequestError, match=f"^request 'B': adapter 'bad': .*{sentence}"):
        raise error
    assert "\n" not in str(error)
    assert [outputs[i].token_ids for i in (0, 2)] == [right(name, tuple(SHARED)) for name in ("poet", None)]


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    config = make_decoder().config
    for change, sentence in (
        ({"num_layers": 3}, r"'base_model\S+layers.2\S+' .* \(and 7 more\)"),
        ({"head_dim": 4}, "needs"),
    ):
        path = write_example_adapter(tmp_path / sentence[:3], replace(config, **change), 1)
        with pytest.raises(CheckpointError, match=sentence):
            load_lora(path, config)


@pytest.mark.parametrize("value", ["", None, 3, Path("x")])
def test_an_adapter_has_a_name_and_a_path(value: Any) -> None:
    with pytest.raises(ConfigError, match="an adapter's name must be text"):
        Adapter(value, "x")
    with pytest.raises(ConfigError, match="an adapter's path must be text"):
        Adapter("x", value)


# The front door


def test_one_adapter_for_all_or_one_for_each(engines: dict[str, LLM]) -> None:
    llm, params, poet = engines["v1"], SamplingParams(max_tokens=6), adapter("poet")
    text = "the rain in spain"
    prompt = tuple(make_tokenizer().encode(text).ids)
    said = [right("poet", prompt), right(None, prompt)]
    assert [o.token_ids for o in llm.generate([text] * 2, params, adapter=poet)] == [said[0]] * 2
    assert [o.token_ids for o in llm.generate([text] * 2, params, adapter=[poet, None])] == said
    assert llm.generate(text, params, adapter=poet)[0].token_ids == said[0]
    with pytest.raises(ConfigError, match="1 adapter for 2 prompts; give one for each"):
        llm.generate([text] * 2, params, adapter=[poet])
    with pytest.raises(ConfigError, match="no option 'adaptor'; did you mean 'adapter'"):
        llm.generate([text], adaptor=[poet])


def test_the_example_is_the_same_for_the_same_seed_and_changes_what_the_tiny_model_says(
    tmp_path: Path,
) -> None:
    llm = LLM()
    config = llm.engine.model_runner.model.config  # type: ignore[union-attr]
    first, again, other = (
        write_example_adapter(tmp_path / n, config, s) for n, s in (("a", 1), ("b", 1), ("c", 2))
    )
    contents = [(Path(p) / WEIGHTS).read_bytes() for p in (first, again, other)]
    assert contents[0] == contents[1] != contents[2]
    prompt = "Q: What is a block table?\nA:"
    adapters = [None, *(Adapter(path, path) for path in (first, other))]
    outputs = llm.generate([prompt] * 3, SamplingParams(max_tokens=12), adapter=adapters)
    assert len({output.text for output in outputs}) == 3
