"""The router: to the engine that has the prefix, unless a queue has grown there."""

from __future__ import annotations

import pytest

from refengine.commands.bench_router import RouterWorkload, route
from refengine.config import EngineConfig
from refengine.errors import ConfigError, RequestError
from refengine.router import Router
from refengine.sampling import SamplingParams
from refengine.v0.engine import LLMEngine
from tests.unit.helpers import numbers
from tests.unit.models import VOCAB_SIZE, make_decoder, make_engine

PREFIX = numbers(1, 16)
OTHER = [VOCAB_SIZE - 1 - token for token in PREFIX]
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def make_router(num_engines: int = 2, policy: str = "cache_aware", **options: object) -> Router:
    return Router([make_engine(enable_kv_events=True, **options) for _ in range(num_engines)], policy)


def test_a_request_goes_where_its_prefix_lies() -> None:
    router = make_router()
    assert router.add_request("a", [*PREFIX, 20], ONE) == 0
    assert router.add_request("b", [*OTHER, 20], ONE) == 1, "the first engine has more waiting"
    router.run()
    assert router.add_request("c", [*OTHER, 21], ONE) == 1
    assert router.add_request("d", [*PREFIX, 21], ONE) == 0
    router.run()
    assert router.hit_rate == pytest.approx(32 / 68)


def test_requests_that_arrive_together_are_kept_together() -> None:
    """When the second is placed, the first has left no event yet."""
    router = make_router()
    assert [router.add_request(str(i), [*PREFIX, 20 + i], ONE) for i in range(4)] == [0, 0, 0, 0]


def test_a_long_queue_outweighs_a_short_prefix() -> None:
    router = make_router()
    router.add_request("a", [*PREFIX[:4], 20], ONE)
    router.run()
    for i in range(2):  # they share with the first only; each adds to its queue
        router.add_request(f"busy {i}", [*PREFIX[:4], *numbers(10 + i, 15 + i)], ONE)
    assert router.members[0].num_queued_tokens == 12
    assert router.add_request("b", [*PREFIX[:4], 21], ONE) == 1


def test_the_answer_does_not_depend_on_where_it_is_computed() -> None:
    prompts = {str(i): [*(PREFIX if i % 2 else OTHER), i] for i in range(6)}
    answers = []
    for policy in ("cache_aware", "round_robin"):
        router = make_router(3, policy)
        for request_id, prompt in prompts.items():
            router.add_request(request_id, prompt, SamplingParams(max_tokens=5, ignore_eos=True))
        answers.append(router.run())
    assert answers[0] == answers[1] and set(answers[0]) == set(prompts)


def test_nothing_is_remembered_of_a_request_that_is_done_or_aborted() -> None:
    router = make_router()
    router.add_request("a", [*PREFIX, 20], ONE)
    router.add_request("b", [*OTHER, 20], ONE)
    router.abort("b")
    router.abort("b")
    router.run()
    assert router.placed == {}
    assert [(member.num_queued_tokens, +member.promised) for member in router.members] == [(0, {}), (0, {})]


def test_a_refused_request_leaves_no_trace() -> None:
    router = make_router()
    with pytest.raises(RequestError):
        router.add_request("a", [], ONE)
    assert router.placed == {} and router.members[0].num_queued_tokens == 0


@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
def test_an_id_is_in_use_on_whichever_engine_it_runs(policy: str) -> None:
    router = make_router(policy=policy)
    router.add_request("a", [*PREFIX, 20], ONE)
    with pytest.raises(RequestError, match="the id is in use by an unfinished request"):
        router.add_request("a", [*OTHER, 20], ONE)
    assert list(router.run()) == ["a"]
    router.add_request("a", [*OTHER, 20], ONE)  # it is free again


def test_a_request_that_came_in_past_the_router_does_not_disturb_it() -> None:
    router = make_router(1)
    router.members[0].core.add_request("theirs", [*PREFIX, 20], ONE)
    router.add_request("ours", [*PREFIX, 21], ONE)
    assert set(router.run()) == {"theirs", "ours"} and router.placed == {}


def test_a_salt_keeps_tenants_apart() -> None:
    router = make_router()
    router.add_request("a", [*PREFIX, 20], ONE, cache_salt="one")
    router.run()
    assert router.add_request("b", [*PREFIX, 21], ONE, cache_salt="two") == 1, "a's blocks are not for b"
    assert router.add_request("c", [*PREFIX, 21], ONE, cache_salt="one") == 0


def test_an_engine_that_was_in_use_before_is_known_from_its_kept_events() -> None:
    engine = make_engine(enable_kv_events=True)
    engine.add_request("a", [*PREFIX, 20], ONE)
    while engine.has_unfinished_requests:
        engine.step()
    router = Router([make_engine(enable_kv_events=True), engine])
    assert router.add_request("b", [*PREFIX, 21], ONE) == 1


@pytest.mark.parametrize(
    ("engines", "sentence"),
    [
        ([], "at least one engine"),
        ([{}], "needs enable_prefix_caching and enable_kv_events"),
        ([{"enable_kv_events": True, "enable_prefix_caching": False}], "needs enable_prefix_caching"),
        (
            [{"enable_kv_events": True}, {"enable_kv_events": True, "hash_seed": "1"}],
            "hash the same tokens differently",
        ),
        (
            [{"enable_kv_events": True}, {"enable_kv_events": True, "block_size": 8}],
            "hash the same tokens differently",
        ),
    ],
    ids=str,
)
def test_engines_that_do_not_fit_together_are_refused(engines: list[dict], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Router([make_engine(**options) for options in engines])


def test_what_is_no_list_of_v1_engines_is_refused() -> None:
    engine = make_engine(enable_kv_events=True)
    with pytest.raises(ConfigError, match="the same engine is in the list twice"):
        Router([engine, engine])
    with pytest.raises(ConfigError, match="stands before V1 engines"):
        Router([engine, LLMEngine(EngineConfig(engine="v0", num_blocks=9), make_decoder(), (), None)])


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        make_router(policy="random")


def test_mirrors_are_worth_it_when_prefixes_do_not_fit_everywhere() -> None:
    workload = RouterWorkload(num_requests=40, num_prefixes=9, prefix_tokens=48, prefixes_per_engine=4)
    aware, turns = (route(workload, policy) for policy in ("cache_aware", "round_robin"))
    assert aware.hit_rate > turns.hit_rate + 0.1
    assert aware.computed_tokens < turns.computed_tokens
    assert min(aware.placed) > 0, "no engine stays idle"
