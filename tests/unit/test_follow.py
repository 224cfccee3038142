"""Following a request: told from the running engine, complete, true in every number, and gone without a trace."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from refengine import LLM, ConfigError, RequestError, SamplingParams
from refengine.commands import follow as command
from refengine.trace import codemap, follow_v0, follow_v1
from refengine.trace.codemap import WHO_DECIDES, WHO_SKIPS, followed, our_place, resolve
from refengine.trace.follow import ENGINES, QUESTIONS, Followed, follow, rows
from refengine.trace.record import Record, Recorder
from refengine.trace.watch import Teller, Watch
from tests.unit.helpers import numbers

# Named in ../shared/facts/vllm_v0.md: who answers the two questions in vLLM.
ANSWERS = {
    ("v0", WHO_DECIDES): [
        "ComputedBlocksTracker.get_num_cached_tokens",
        "PrefixCachingBlockAllocator.find_cached_blocks_prefix",
        "SelfAttnBlockSpaceManager.get_common_computed_block_ids",
    ],
    ("v0", WHO_SKIPS): ["ModelInputForGPUBuilder._compute_for_prefix_cache_hit"],
    ("v1", WHO_DECIDES): [
        "KVCacheManager.get_computed_blocks",
        "UnitaryKVCacheCoordinator.find_longest_cache_hit",
        "FullAttentionManager.find_longest_cache_hit",
        "BlockPool.get_cached_block",
    ],
    ("v1", WHO_SKIPS): ["Scheduler.schedule"],
}
TELLERS = {"v0": (follow_v0.TELLERS, follow_v0.STEP), "v1": (follow_v1.TELLERS, follow_v1.STEP)}
STOPS = [pytest.param(engine, stop, id=stop.ours) for engine in ENGINES for stop in followed(engine)]


@pytest.fixture(scope="module")
def path() -> Followed:
    """The request that the command follows if nothing is said."""
    return follow()


# -- the functions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "stop"), STOPS)
def test_a_function_of_the_map_exists_and_is_called_on_the_path(
    path: Followed, engine: str, stop: codemap.Stop
) -> None:
    assert callable(resolve(stop.ours))
    called = [call for call in path[engine].calls if call.ours == stop.ours]
    assert called, f"{stop.ours} was not called"
    assert all(call.decided and call.vllm == stop.vllm for call in called)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_teller_has_its_place_in_the_map(engine: str) -> None:
    assert set(TELLERS[engine][0]) == {stop.ours for stop in followed(engine)}


def test_the_functions_were_really_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by wrappers, an independent way to see a call."""
    counts: dict[str, int] = {}
    for engine in ENGINES:
        for stop in followed(engine):
            owner, _, name = stop.ours.rpartition(".")
            _count(monkeypatch, resolve(owner), name, stop.ours, counts)
    path = follow(warm="")
    for one in path.paths:
        told: dict[str, int] = {}
        for call in one.calls:
            told[call.ours] = told.get(call.ours, 0) + len(call.facts)
        assert told and all(0 < number <= counts[ours] for ours, number in told.items())


def _count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, ours: str, counts: dict[str, int]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def counting(*args: Any, **options: Any) -> Any:
        counts[ours] = counts.get(ours, 0) + 1
        return original(*args, **options)

    monkeypatch.setattr(owner, name, counting)


@pytest.mark.parametrize(("engine", "question"), ANSWERS)
def test_both_questions_are_answered_by_whom_the_facts_name(
    path: Followed, engine: str, question: str
) -> None:
    calls = path[engine].answering(question)
    assert [call.vllm[0].symbol for call in calls] == ANSWERS[engine, question]
    assert all(call.step == 1 for call in calls)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_answers_and_ranges_agree_with_the_call_path(engine: codemap.Generation) -> None:
    """Two lists of the code map name the same functions: they must not contradict each other."""
    steps = {(step.place.file, step.place.symbol): step for step in codemap.call_path(engine)}
    seen = 0
    for stop in followed(engine):
        place = stop.vllm[0]
        step = steps.get((place.file, place.symbol))
        assert place.first_line <= (stop.focus_line or place.first_line) <= place.last_line
        if step is None:
            continue
        seen += 1
        assert step.place == place
        assert stop.answers in (step.answers, None)
    assert seen > 12
    skips = [stop for stop in followed("v1") if stop.answers == WHO_SKIPS]
    assert [stop.focus_line for stop in skips] == [1306]


def test_our_place_is_the_function_without_what_decorates_it() -> None:
    place = our_place("refengine.v1.model_runner.ModelRunner.execute")
    lines = Path(place.file).read_text().splitlines() if Path(place.file).exists() else []
    assert place.file == "refengine/v1/model_runner.py"
    assert not lines or any(
        "def execute(" in line for line in lines[place.first_line - 1 : place.first_line + 2]
    )


# -- the decisions ------------------------------------------------------------------------------------------

LONG = [*numbers(0, 19), 3, 1, 4]  # 22 tokens
CASES = [
    pytest.param(LONG, [*LONG[:13], 9, 9, 9], 4, {}, id="partial"),
    pytest.param(LONG, [*LONG[:13], 9, 9, 9], 8, {}, id="larger blocks"),
    pytest.param(LONG[:16], LONG[:16], 4, {}, id="full hit"),
    pytest.param(LONG[:16], LONG[:16], 16, {}, id="full hit of one block"),
    pytest.param(LONG, [], 4, {}, id="cold"),
    pytest.param(LONG, [30, 30, 30, 30, 30], 4, {}, id="no hit"),
    pytest.param(LONG[:3], LONG[:3], 4, {}, id="shorter than a block"),
    pytest.param(LONG, LONG[:9], 4, {"max_num_batched_tokens": 8}, id="in chunks"),
    pytest.param(LONG, LONG[:9], 4, {"enable_prefix_caching": False}, id="no cache"),
    pytest.param(LONG, LONG[:9], 2, {"enable_chunked_prefill": False}, id="not chunked"),
]


@pytest.fixture(params=["faithful", "fixed"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("prompt", "warm", "block_size", "options"), CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_told_is_what_the_engine_did(
    model_dir: Path,
    engine: str,
    mode: str,
    prompt: list[int],
    warm: list[int],
    block_size: int,
    options: dict[str, Any],
) -> None:
    given = {"mode": mode, "block_size": block_size, "num_blocks": 40} | options
    told = follow(prompt, warm=warm, engine=engine, model=str(model_dir), max_tokens=4, **given)[engine]
    record = _recorded(engine, str(model_dir), prompt, warm, given)
    marks = {kind: _facts(record, kind) for kind in ("lookup", "allocate", "run", "append")}
    found = _told_v0(told, block_size) if engine == "v0" else _told_v1(told)
    caching = options.get("enable_prefix_caching", True)
    run, decode = marks["run"][0], marks["run"][-3]  # 4 tokens: the last three steps decode
    assert found["start"] == run["start"] and found["computed_tokens"] == run["num_tokens"]
    assert found["skipped"] == run["start"]
    assert (
        found["table"][len(found["hit_ids"]) :][: len(marks["allocate"][0]["block_ids"][0])]
        == (marks["allocate"][0]["block_ids"][0])
    )
    assert found["hit_ids"] == (marks["lookup"][0]["block_ids"][0] if caching else [])
    positions = _positions(told, 1) + _positions(told, told.calls[-1].step)
    assert positions == [*range(run["start"], run["start"] + run["num_tokens"]), decode["start"]]
    assert _slots(told, 1) == [
        found["table"][p // block_size] * block_size + p % block_size for p in _positions(told, 1)
    ]
    joined = [fact["token_ids"][0] for call in told.calls for fact in call.facts if fact.get("token_ids")]
    first_two = [mark["token_id"] for mark in marks["append"][:2]]
    assert joined == first_two[2 - len(joined) :]  # of a prompt in chunks the admission samples nothing


def _recorded(engine: str, model: str, prompt: list[int], warm: list[int], given: dict[str, Any]) -> Record:
    """The same on an engine of its own, as its observer heard it."""
    recorder = Recorder()
    llm = LLM(model, engine=engine, observer=recorder, **given)
    if warm:
        llm.generate(warm, SamplingParams(max_tokens=2), request_ids=["warm"])
    llm.generate(prompt, SamplingParams(max_tokens=4), request_ids=["followed"])
    return recorder.record


def _facts(record: Record, kind: str) -> list[dict[str, Any]]:
    return [mark.facts for _, mark in record.marks() if mark.request_id == "followed" and mark.kind == kind]


def _told_v1(told: Any) -> dict[str, Any]:
    lookup = told.find("get_computed_blocks").facts[0]
    skip = told.find("_schedule_waiting").facts[0]
    assert skip["skipped"] == lookup["hit_tokens"]
    return {
        "hit_ids": lookup["block_ids"],
        "skipped": skip["skipped"],
        "start": told.find("Scheduler.schedule").facts[0]["start"],
        "computed_tokens": skip["new"],
        "table": told.find("_update_states").facts[0]["block_table"],
    }


def _told_v0(told: Any, block_size: int) -> dict[str, Any]:
    metadata = told.find("_metadata").facts[0]
    skip = told.find("compute_for_prefix_cache_hit").facts[0]
    hit = told.find("ComputedBlocksTracker.get_num_cached_tokens").facts[-1]["hit_tokens"]
    assert metadata["computed_block_nums"] == told.find("get_common_computed_block_ids").facts[0]["block_ids"]
    assert len(metadata["computed_block_nums"]) * block_size == hit
    return {
        "hit_ids": metadata["computed_block_nums"],
        "skipped": skip["skipped"],
        "start": skip["skipped"],
        "computed_tokens": skip["left"],
        "table": metadata["block_table"],
    }


def _positions(told: Any, step: int) -> list[int]:
    name = "ModelInputBuilder.build" if told.engine == "v0" else "_prepare_inputs"
    return list(told.find(name, step).facts[0]["positions"])


def _slots(told: Any, step: int) -> list[int]:
    name = "compute_slot_mapping" if told.engine == "v0" else "_prepare_inputs"
    return list(told.find(name, step).facts[0]["slots"])


def test_the_example_has_a_hit_and_both_generations_skip_it(path: Followed) -> None:
    skipped = [
        path.v0.find("compute_for_prefix_cache_hit").facts[0]["skipped"],
        path.v1.find("_schedule_waiting").facts[0]["skipped"],
    ]
    assert skipped[0] == skipped[1] > 0
    assert path.v0.answer == path.v1.answer
    assert path.v1.find("cache_full_blocks").facts[0]["block_ids"], "a block is published, too"
    assert path.v0.find("mark_blocks_as_computed").facts[0]["block_ids"]


def test_v0_computes_as_many_tokens_as_v1_and_counts_them_all(path: Followed) -> None:
    assert path.v0.find("LLMEngine._update").facts[0]["chunk"] == path.num_tokens
    assert path.v1.find("EngineCore.step").facts[0]["num_tokens"] < path.num_tokens


def test_a_decode_skips_nothing_and_v1_does_not_look_up(path: Followed) -> None:
    assert path.v0.find("compute_for_prefix_cache_hit", 2).decided.startswith("a decode:")
    assert not [call for call in path.v1.calls if call.step == 2 and call.mark == "lookup"]


@pytest.mark.parametrize(
    ("prompt", "given", "size"), [("a" * 9, {}, 2), ("b" * 100, {}, 16), ("c" * 9, {"block_size": 8}, 8)]
)
def test_without_a_word_a_prompt_gets_a_warm_cache_and_blocks_that_it_fills(
    model_dir: Path, prompt: str, given: dict[str, Any], size: int
) -> None:
    path = follow(prompt, engine="v1", model=str(model_dir), max_tokens=2, **given)
    assert path.block_size == size and prompt.startswith(path.warm)
    hit = path.v1.find("get_computed_blocks").facts[0]["hit_tokens"]
    assert hit >= size or given


def test_the_same_text_is_asked_another_question() -> None:
    path = follow("Ada lives by the mill.\nQ: Where does Ada live?\nA:", engine="v1")
    assert path.warm == "Ada lives by the mill.\nQ: What is a step?\nA:"


# -- watching -----------------------------------------------------------------------------------------------


def _profile(frame: Any, event: str, argument: Any) -> None:
    """Somebody else's."""


@pytest.fixture()
def profiled() -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(_profile)
    yield
    sys.setprofile(before)


@pytest.mark.usefixtures("profiled")
def test_nothing_is_left_behind_not_even_by_a_failure(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow([1, 2, 3], engine="v0", model=str(model_dir), max_tokens=2)
    assert sys.getprofile() is _profile
    with pytest.raises(RequestError, match="followed"):
        follow([1, 2, 999_999], warm=[], model=str(model_dir))
    assert sys.getprofile() is _profile
    for engine, module in (
        ("v0", "refengine.v0.worker.Worker"),
        ("v1", "refengine.v1.model_runner.ModelRunner"),
    ):
        monkeypatch.setattr(resolve(module), "_sample", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            follow([1, 2, 3], warm=[], engine=engine, model=str(model_dir))
        assert sys.getprofile() is _profile


def _interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


def _decide(number: int) -> int:
    if number < 0:
        raise ValueError
    return number + 1


def test_a_call_that_decided_nothing_or_failed_is_not_told() -> None:
    stop = codemap.Stop(f"{__name__}._decide", "", None, (), None, None)
    teller = Teller(lambda variables, result: {"n": result + 0} if result != 3 else None, str)
    with Watch((stop,), {stop.ours: teller}, f"{__name__}._profile") as watch:
        assert [_decide(n) for n in (1, 2, 3)] == [2, 3, 4]
        with pytest.raises(ValueError):
            _decide(-1)
    assert [sighting.facts for sighting in watch.sightings] == [[{"n": 2}, {"n": 4}]]
    _decide(1)
    assert len(watch.sightings) == 1


def test_a_teller_that_fails_is_heard() -> None:
    stop = codemap.Stop(f"{__name__}._decide", "", None, (), None, None)
    teller = Teller(lambda variables, result: {"n": variables["gone"]}, str)
    before = sys.getprofile()
    with pytest.raises(KeyError), Watch((stop,), {stop.ours: teller}, f"{__name__}._profile"):
        _decide(1)
    assert sys.getprofile() is before


# -- keeping it ---------------------------------------------------------------------------------------------


def test_two_runs_tell_the_same(path: Followed) -> None:
    assert follow() == path


def test_saved_and_loaded_it_is_the_same(path: Followed, tmp_path: Path) -> None:
    path.save(tmp_path / "path.json")
    assert Followed.load(tmp_path / "path.json") == path
    (tmp_path / "other.json").write_text('{"schema": 1}')
    with pytest.raises(ValueError, match="not a followed request"):
        Followed.load(tmp_path / "other.json")


def test_rows_put_the_same_mark_of_both_beside_each_other(path: Followed) -> None:
    found = rows(path)
    keys = [(row.step, row.mark) for row in found]
    assert len(set(keys)) == len(keys)
    for engine in ENGINES:
        assert tuple(call for row in found for call in row.calls[engine]) == path[engine].calls
    (lookup,) = [row for row in found if (row.step, row.mark) == (1, "lookup")]
    assert all(lookup.calls.values())


def test_bad_requests_are_one_sentence(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="'v2' is not one of v0, v1, both"):
        follow(engine="v2")
    with pytest.raises(RequestError, match="empty"):
        follow([], warm=[], model=str(model_dir))
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        follow("abc", model=str(model_dir), blok_size=4)
    with pytest.raises(ValueError, match="get_computed_blocks was not called in step 2 of v1"):
        follow("abc", engine="v1", model=str(model_dir), max_tokens=2).v1.find("get_computed_blocks", 2)


# -- the command --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 131, 132, 160, 220])
def test_it_reads_well_at_every_width(path: Followed, width: int) -> None:
    out = io.StringIO()
    command.show(path, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for one in path.paths:
        assert f"(vLLM {one.release})" in text
        for call in one.calls:
            assert call.name in text
    for words in QUESTIONS.values():
        assert words in text
    marked = sum(line.count("[1]") + line.count("[2]") for line in lines)
    assert marked == 2 + sum(bool(call.answers) for one in path.paths for call in one.calls)
    side_by_side = [line for line in lines if "EngineCore.step" in line and "LLMEngine.step" in line]
    assert bool(side_by_side) == (width >= command.WIDE)


def test_narrow_output_holds_every_decision_and_place(path: Followed) -> None:
    out = io.StringIO()
    command.show(path, Console(file=out, width=400))
    text = out.getvalue()
    for one in path.paths:
        for call in one.calls:
            assert call.decided in text
            assert all(str(place) in text for place in call.vllm)
            ours = our_place(call.ours)
            assert f"{ours.file} {ours.first_line}-{ours.last_line}" in text


def test_the_command_runs_one_engine_and_writes_the_file(tmp_path: Path) -> None:
    out = io.StringIO()
    file = tmp_path / "path.json"
    options = command.FollowOptions(None, "v0", "tiny", "", file, {"block_size": 16})
    command.run_follow(options, Console(file=out, width=80))
    loaded = Followed.load(file)
    assert [path.engine for path in loaded.paths] == ["v0"] and not loaded.warm
    assert "nothing: the cache is cold" in out.getvalue() and "EngineCore" not in out.getvalue()
    assert "no hit: nothing is skipped" in out.getvalue()
