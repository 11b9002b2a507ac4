"""The champion: one pointer, a history, and a change that a kill cannot leave half done."""

import pytest

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger


def test_promotions_and_roll_backs_walk_the_stack(ledger: Ledger) -> None:
    promotions = ledger.promotions
    assert promotions.current() is None
    for number, checkpoint_id in enumerate(["a", "b", "c"]):
        promotions.promote(checkpoint_id, f"card-{checkpoint_id}", "gate passed", float(number))
    assert promotions.roll_back("users reverted edits", 4.0).checkpoint_id == "b"
    assert promotions.roll_back("again", 5.0).checkpoint_id == "a"
    assert promotions.promote("d", None, "by hand", 6.0).checkpoint_id == "d"

    back = promotions.roll_back("no", 7.0)
    assert (back.checkpoint_id, back.scorecard_id) == ("a", "card-a")
    assert promotions.current() == back
    assert [entry.to_checkpoint_id for entry in promotions.history()] == list("abcbada")


def test_promote_of_the_champion_changes_nothing(ledger: Ledger) -> None:
    first = ledger.promotions.promote("a", "card", "gate passed", 1.0)

    assert ledger.promotions.promote("a", "card", "gate passed", 2.0) == first
    assert len(ledger.promotions.history()) == 1


def test_roll_back_of_a_checkpoint_that_is_gone_changes_nothing(ledger: Ledger) -> None:
    ledger.promotions.promote("a", None, "", 1.0)
    ledger.promotions.promote("b", None, "", 2.0)
    for _ in range(2):
        assert ledger.promotions.roll_back("bad", 3.0, checkpoint_id="b").checkpoint_id == "a"


def test_roll_back_without_an_earlier_champion_is_refused(ledger: Ledger) -> None:
    with pytest.raises(StorageError, match="from checkpoint None: no champion before it"):
        ledger.promotions.roll_back("bad", 1.0)
    ledger.promotions.promote("only", None, "", 1.0)
    with pytest.raises(StorageError, match="from checkpoint only: no champion before it"):
        ledger.promotions.roll_back("bad", 1.0)


def test_kill_before_the_flip_is_undone(ledger: Ledger) -> None:
    ledger.promotions.promote("a", None, "", 1.0)
    ledger.promotions._open_entry("promote", "b", None, "killed here", 2.0)

    states = [(entry.to_checkpoint_id, entry.state) for entry in ledger.promotions.history()]
    assert states == [("a", "closed"), ("b", "undone")]
    current = ledger.promotions.current()
    assert current is not None
    assert current.checkpoint_id == "a"
    assert ledger.promotions.promote("b", None, "again", 3.0).checkpoint_id == "b"


def test_kill_after_the_flip_is_finished(ledger: Ledger) -> None:
    ledger.promotions.promote("a", None, "", 1.0)
    entry_id = ledger.promotions._open_entry("promote", "b", None, "killed after flip", 2.0)
    ledger.promotions._flip(entry_id)

    assert ledger.promotions.promote("b", None, "again", 3.0).entry_id == entry_id
    assert [entry.state for entry in ledger.promotions.history()] == ["closed", "closed"]
    assert ledger.promotions.roll_back("bad", 4.0).checkpoint_id == "a"
