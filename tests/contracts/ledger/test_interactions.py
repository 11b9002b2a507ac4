"""Interactions in order, each once, joined with what users said."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import FeedbackRow
from tests.fakes.interactions import new_interaction


def _record(ledger: Ledger, interaction_id: str, line: str = "nano") -> None:
    ledger.interactions.record(new_interaction(interaction_id, line))


def _said(feedback_id: str, interaction_id: str) -> FeedbackRow:
    return FeedbackRow(
        feedback_id=feedback_id,
        interaction_id=interaction_id,
        signal="thumbs",
        value=1.0,
        created_at=20.0,
    )


def test_since_gives_each_interaction_once_with_its_feedback(ledger: Ledger) -> None:
    for interaction_id in ("first", "second", "first"):
        _record(ledger, interaction_id)
    for feedback_id in ("f1", "f1", "f2"):
        ledger.interactions.add_feedback(_said(feedback_id, "second"))

    first, second = ledger.interactions.since(0)
    assert (first.interaction_id, first.feedback) == ("first", ())
    assert [signal.feedback_id for signal in second.feedback] == ["f1", "f2"]
    assert (second.arm, second.consent, second.created_at) == ("control", True, 1.0)
    assert ledger.interactions.get("second") == second
    assert ledger.interactions.get("nobody") is None


def test_windows_between_watermarks_neither_miss_nor_repeat(ledger: Ledger) -> None:
    watermark, seen = 0, []
    for turn in range(3):
        _record(ledger, f"a{turn}")
        _record(ledger, f"b{turn}")
        until = ledger.interactions.latest_watermark()
        seen += [row.interaction_id for row in ledger.interactions.since(watermark, until)]
        watermark = until

    assert seen == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert ledger.interactions.since(watermark) == []


def test_lines_do_not_see_one_another(ledger: Ledger) -> None:
    for number, line in enumerate(("nano", "tests", "nano")):
        _record(ledger, f"i{number}", line=line)
    seen = [row.interaction_id for row in ledger.interactions.since(0, line="nano")]
    assert seen == ["i0", "i2"]
    assert len(ledger.interactions.since(0)) == 3


def test_concurrent_writers_a_reader_misses_none(ledger: Ledger) -> None:
    names = [f"i{number}" for number in range(40)]
    watermark, seen = 0, []
    with ThreadPoolExecutor(4) as threads:
        writes = [threads.submit(_record, ledger, name) for name in names]
        while len(seen) < len(names):
            for row in ledger.interactions.since(watermark):
                seen.append(row.interaction_id)
                watermark = row.sequence
    assert all(write.exception() is None for write in writes)
    assert sorted(seen) == sorted(names)


def test_feedback_about_nothing_is_refused(ledger: Ledger) -> None:
    with pytest.raises(StorageError, match="feedback f is about interaction 'nobody'"):
        ledger.interactions.add_feedback(_said("f", "nobody"))
