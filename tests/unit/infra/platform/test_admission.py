"""Laws of the token bucket."""

import hypothesis.strategies as st
from hypothesis import given, settings

from ostinato.infra.serving.gateway.tenants import TokenBucket

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
