"""Artifacts, scorecards and events as rows."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import ArtifactRow, ScorecardRow


def _add(
    ledger: Ledger, fingerprint: str, parents: tuple[tuple[str, str, str], ...] = ()
) -> ArtifactRow:
    return ledger.artifacts.add(
        "checkpoint",
        "base",
        fingerprint,
        object_prefix=f"artifacts/{fingerprint}",
        parents=parents,
        at=1.0,
    )


def test_versions_count_up_and_a_known_fingerprint_keeps_its_own(ledger: Ledger) -> None:
    assert [_add(ledger, name).version for name in ("x", "y", "x", "z")] == [1, 2, 1, 3]
    assert ledger.artifacts.find("checkpoint", "base", "y") == _add(ledger, "y")
    assert [row.version for row in ledger.artifacts.list("checkpoint")] == [1, 2, 3]


def test_versions_of_concurrent_writers_are_distinct(ledger: Ledger) -> None:
    with ThreadPoolExecutor(4) as threads:
        rows = list(threads.map(lambda number: _add(ledger, f"f{number}"), range(12)))

    assert sorted(row.version for row in rows) == list(range(1, 13))


def test_parents_are_kept_and_unknown_ones_refused(ledger: Ledger) -> None:
    parent = _add(ledger, "parent")
    child = _add(ledger, "child", (("checkpoint", "base", "parent"),))

    assert ledger.artifacts.parents(child.artifact_id) == (parent,)
    with pytest.raises(StorageError, match="has parent checkpoint/base/nobody"):
        _add(ledger, "orphan", (("checkpoint", "base", "nobody"),))
    assert ledger.artifacts.find("checkpoint", "base", "orphan") is None


def test_scorecards_are_written_once_and_judged_later(ledger: Ledger) -> None:
    def card(number: int, passed: bool | None = None) -> ScorecardRow:
        return ScorecardRow(
            scorecard_id=f"card-{number}",
            checkpoint_id="c",
            suite="held_out",
            passed=passed,
            payload={"average": number / 2},
            created_at=float(number),
        )

    for added in (card(1), card(2), card(1), card(2, passed=True)):
        ledger.scorecards.add(added)

    first, second = ledger.scorecards.get("card-1"), ledger.scorecards.get("card-2")
    assert first is not None
    assert second is not None
    assert (first.payload, first.passed, second.passed) == ({"average": 0.5}, None, True)


def test_events_come_newest_first(ledger: Ledger) -> None:
    for number in range(3):
        ledger.events.add("trainer", "waits", {"for": number}, float(number))
    ledger.events.add("gateway", "serves", {}, 9.0)

    assert [event.payload["for"] for event in ledger.events.recent("trainer")] == [2, 1, 0]
    assert [event.name for event in ledger.events.recent(limit_rows=1)] == ["serves"]


def test_event_is_added_once_by_its_key_however_many_try(ledger: Ledger) -> None:
    def add(number: int) -> bool:
        payload = {"gate": number % 2, "by": number}
        return ledger.events.add_once("line", "ended", payload, 1.0, key="gate")

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(add, range(16))) == [False] * 14 + [True] * 2
    assert sorted(event.payload["gate"] for event in ledger.events.recent("line")) == [0, 1]
    assert ledger.events.add_once("other line", "ended", {"gate": 0}, 1.0, key="gate")


def test_event_with_numbers_that_json_lacks_is_kept(ledger: Ledger) -> None:
    payload = {"k3": float("nan"), "worst": [float("inf"), 1.5], "inner": {"low": -float("inf")}}
    ledger.events.add("run", "parity_alarm", payload, 1.0)
    (event,) = ledger.events.recent("run")
    assert event.payload == {"k3": "nan", "worst": ["inf", 1.5], "inner": {"low": "-inf"}}
