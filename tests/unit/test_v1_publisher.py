"""Batches of KV events: numbered without gaps, sent to everybody, kept for latecomers."""

from __future__ import annotations

import pytest

from refengine.errors import ConfigError
from refengine.v1.events import AllBlocksCleared, BlockRemoved, BlockStored
from refengine.v1.publisher import EventBatch, EventPublisher
from tests.unit.helpers import numbers
from tests.unit.models import make_engine, serve

SOME = [AllBlocksCleared()]


def test_a_subscriber_gets_every_batch_in_order_until_it_leaves() -> None:
    publisher = EventPublisher()
    got: list[EventBatch] = []
    leave = publisher.subscribe(got.append)
    publisher.publish(SOME)
    publisher.publish([])
    publisher.publish(SOME)
    leave()
    publisher.publish(SOME)
    assert [batch.sequence for batch in got] == [0, 1], "an empty batch is no batch, and has no number"


def test_a_latecomer_can_have_what_was_sent_before() -> None:
    publisher = EventPublisher()
    for _ in range(3):
        publisher.publish(SOME)
    assert [batch.sequence for batch in publisher.replay()] == [0, 1, 2]
    assert [batch.sequence for batch in publisher.replay(2)] == [2]
    assert publisher.replay(3) == []


def test_what_is_not_kept_any_more_is_refused_and_not_left_out() -> None:
    publisher = EventPublisher(num_kept=2)
    for _ in range(3):
        publisher.publish(SOME)
    with pytest.raises(ConfigError, match="event batches 0 to 0 are not kept any more"):
        publisher.replay()
    assert [batch.sequence for batch in publisher.replay(1)] == [1, 2]


def test_an_engine_publishes_one_batch_for_each_step_that_changed_its_index() -> None:
    engine = make_engine(enable_kv_events=True)
    got: list[EventBatch] = []
    engine.publisher.subscribe(got.append)
    serve(engine, {"A": numbers(1, 5)})  # block 1 with the prompt, block 2 when its last token comes
    assert [type(event) for batch in got for event in batch.events] == [BlockStored, BlockStored]
    assert [batch.sequence for batch in got] == [0, 1]


def test_a_reset_is_told_at_once_and_not_with_the_next_step() -> None:
    engine = make_engine(enable_kv_events=True)
    serve(engine, {"A": numbers(1, 5)})
    assert engine.reset_prefix_cache()
    assert engine.publisher.replay()[-1].events == (AllBlocksCleared(),)


def test_an_engine_without_events_publishes_nothing() -> None:
    engine = make_engine()
    serve(engine, {"A": numbers(1, 9)})
    assert engine.publisher.replay() == []


def test_evictions_are_told() -> None:
    engine = make_engine(enable_kv_events=True, num_blocks=5)
    serve(engine, {"A": numbers(1, 9)})
    serve(engine, {"B": numbers(11, 20)})
    events = [event for batch in engine.publisher.replay() for event in batch.events]
    assert any(isinstance(event, BlockRemoved) for event in events)
