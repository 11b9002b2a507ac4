"""Cycles: one open at a time, stages replaced, watermarks of closed cycles only."""

import pytest

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger


def test_a_cycle_resumes_with_what_its_stages_left(ledger: Ledger) -> None:
    opened = ledger.cycles.open("one", 0, 40, 1.0)
    assert ledger.cycles.open("one", 5, 99, 2.0) == opened
    ledger.cycles.update("one", "collect", {"interactions": 12})
    ledger.cycles.update("one", "train", {"step": 1})
    ledger.cycles.update("one", "train", {"step": 2})

    now = ledger.cycles.open_cycle()
    assert now is not None
    assert now.stages == {"collect": {"interactions": 12}, "train": {"step": 2}}
    assert ledger.cycles.last_closed_watermark() == 0


def test_closing_moves_the_watermark_and_keeps_the_first_outcome(ledger: Ledger) -> None:
    ledger.cycles.open("one", 0, 40, 1.0)
    ledger.cycles.close("one", "promoted", 2.0)
    ledger.cycles.close("one", "refused", 3.0)
    ledger.cycles.open("two", 40, 50, 4.0)

    assert ledger.cycles.last_closed_watermark() == 40
    one, two = ledger.cycles.history()
    assert (one.outcome, one.closed_at) == ("promoted", 2.0)
    assert ledger.cycles.open_cycle() == two
    assert ledger.cycles.get("one") == one


def test_a_second_open_cycle_is_refused(ledger: Ledger) -> None:
    ledger.cycles.open("one", 0, 40, 1.0)
    with pytest.raises(StorageError, match="cycle two cannot open: cycle one is open since 1"):
        ledger.cycles.open("two", 40, 50, 2.0)


def test_an_unknown_cycle_is_refused(ledger: Ledger) -> None:
    with pytest.raises(StorageError, match="cycle 'none' is not in the ledger"):
        ledger.cycles.update("none", "collect", {})
