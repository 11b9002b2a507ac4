"""Cycles: one open at a time, stages replaced, watermarks of closed cycles only."""

import pytest

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.rows import CycleRow


def open_one(
    ledger: Ledger, cycle_id: str, start: int, until: int, at: float, line: str = "nano"
) -> CycleRow:
    return ledger.cycles.open(
        cycle_id, line=line, served="c", from_watermark=start, to_watermark=until, at=at
    )


def test_a_cycle_resumes_with_what_its_stages_left(ledger: Ledger) -> None:
    opened = open_one(ledger, "one", 0, 40, 1.0)
    assert open_one(ledger, "one", 5, 99, 2.0) == opened
    ledger.cycles.update("one", "collect", {"interactions": 12})
    ledger.cycles.update("one", "train", {"step": 1})
    ledger.cycles.update("one", "train", {"step": 2})

    now = ledger.cycles.open_cycle("nano")
    assert now is not None
    assert now.stages == {"collect": {"interactions": 12}, "train": {"step": 2}}
    assert ledger.cycles.last_closed_watermark("nano") == 0


def test_closing_moves_the_watermark_and_keeps_the_first_outcome(ledger: Ledger) -> None:
    open_one(ledger, "one", 0, 40, 1.0)
    ledger.cycles.close("one", "promoted", 2.0)
    ledger.cycles.close("one", "refused", 3.0)
    open_one(ledger, "two", 40, 50, 4.0)

    assert ledger.cycles.last_closed_watermark("nano") == 40
    one, two = ledger.cycles.history("nano")
    assert (one.outcome, one.closed_at) == ("promoted", 2.0)
    assert ledger.cycles.open_cycle("nano") == two
    assert ledger.cycles.history("nano")[0] == one


def test_a_second_open_cycle_is_refused(ledger: Ledger) -> None:
    open_one(ledger, "one", 0, 40, 1.0)
    with pytest.raises(StorageError, match="cycle two cannot open: cycle one is open since 1"):
        open_one(ledger, "two", 40, 50, 2.0)


def test_an_unknown_cycle_is_refused(ledger: Ledger) -> None:
    with pytest.raises(StorageError, match="cycle 'none' is not in the ledger"):
        ledger.cycles.update("none", "collect", {})


def test_lines_have_cycles_and_watermarks_of_their_own(ledger: Ledger) -> None:
    open_one(ledger, "one", 0, 40, 1.0)
    open_one(ledger, "theirs", 0, 90, 1.0, line="tests")
    ledger.cycles.close("theirs", "promoted", 2.0)
    assert ledger.cycles.last_closed_watermark("tests") == 90
    assert ledger.cycles.last_closed_watermark("nano") == 0
    assert [row.cycle_id for row in ledger.cycles.history("nano")] == ["one"]
