"""Laws of the queue of waiting requests and of the token bucket."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ostinato.infra.platform.admission import AdmissionQueue, TokenBucket

quick = settings(max_examples=50, deadline=None)


@quick
@given(
    per_second=st.floats(0.1, 50),
    burst=st.integers(1, 20),
    steps=st.lists(st.floats(0, 2), max_size=60),
)
def test_bucket_lets_no_span_through_faster_than_its_bound(per_second, burst, steps):
    bucket, now, taken = TokenBucket(per_second, burst, 0.0), 0.0, list[float]()
    for step in steps:
        now += step
        while bucket.take(now):
            taken.append(now)

    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + per_second * (taken[last] - taken[first]) + 1e-6


def test_bucket_refills_to_its_burst_and_no_further():
    bucket = TokenBucket(2.0, 3, 0.0)
    at_once = sum(bucket.take(0.0) for _ in range(10))
    after_an_hour = sum(bucket.take(3600.0) for _ in range(10))
    half_a_second_later = sum(bucket.take(3600.5) for _ in range(10))

    assert (at_once, after_an_hour, half_a_second_later) == (3, 3, 1)


def test_bucket_says_when_the_next_token_comes():
    bucket = TokenBucket(0.5, 1, 0.0)
    assert (bucket.take(0.0), bucket.seconds_until_token(0.5)) == (True, 1.5)
    assert (bucket.take(1.9), bucket.take(2.0)) == (False, True)


@quick
@given(ranks=st.lists(st.integers(0, 3), max_size=30))
def test_queue_is_served_by_rank_then_arrival(ranks):
    queue: AdmissionQueue[tuple[int, int]] = AdmissionQueue()
    for number, rank in enumerate(ranks):
        queue.push(number, (rank, number), rank=rank)
    assert len(queue) == len(ranks)
    served: list[tuple[int, int]] = []
    assert queue.place(lambda item: not served.append(item)) == len(ranks)
    assert served == sorted(served)
    assert len(queue) == 0


def test_head_that_finds_no_room_is_not_overtaken():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for name in ("large", "small"):
        queue.push(name, name, rank=0)
    assert queue.place(lambda name: name == "small") == 0
    assert queue.head() == "large"


def test_request_that_left_and_came_back_queues_at_the_end_unless_put_in_front():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for name in ("left", "stayed"):
        queue.push(name, name, rank=1)
    assert (queue.remove("left"), queue.remove("left")) == ("left", None)
    queue.push("left", "left", rank=1)
    assert queue.head() == "stayed"
    queue.push("back", "back", rank=1, at_front=True)
    assert queue.head() == "back"
    with pytest.raises(ValueError, match="waits already"):
        queue.push("back", "back", rank=0)


def test_those_whose_patience_is_over_leave_in_that_order():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for name, until in (("late", 9.0), ("early", 3.0), ("never", float("inf")), ("long", 50.0)):
        queue.push(name, name, rank=0, until_seconds=until)
    assert (queue.expire(10.0), len(queue)) == (["early", "late"], 2)
