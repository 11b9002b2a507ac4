"""The champion: one pointer, a history, and a change that is whole or not there."""

import pytest

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger

LINE = "nano"


def test_promotions_and_roll_backs_walk_the_stack(ledger: Ledger) -> None:
    promotions = ledger.promotions
    assert promotions.current(LINE) is None
    for number, checkpoint_id in enumerate(["a", "b", "c"]):
        promotions.promote(
            LINE, checkpoint_id, f"card-{checkpoint_id}", "gate passed", float(number)
        )
    assert promotions.roll_back(LINE, "users reverted edits", 4.0).checkpoint_id == "b"
    assert promotions.roll_back(LINE, "again", 5.0).checkpoint_id == "a"
    promotions.promote(LINE, "d", None, "by hand", 6.0)
    assert promotions.active_checkpoints(LINE)[-1] == "d"

    back = promotions.roll_back(LINE, "no", 7.0)
    assert (back.checkpoint_id, back.scorecard_id) == ("a", "card-a")
    assert promotions.current(LINE) == back
    assert [entry.checkpoint_id for entry in promotions.history(LINE)] == list("abcbada")


def test_promote_of_the_champion_changes_nothing(ledger: Ledger) -> None:
    first = ledger.promotions.promote(LINE, "a", "card", "gate passed", 1.0)

    assert ledger.promotions.promote(LINE, "a", "card", "gate passed", 2.0) == first
    assert len(ledger.promotions.history(LINE)) == 1


def test_promote_instead_of_another_than_the_champion_changes_nothing(ledger: Ledger) -> None:
    promote = ledger.promotions.promote
    assert promote(LINE, "b", None, "", 1.0, instead_of="a") is None
    promote(LINE, "a", None, "", 1.0)
    assert promote(LINE, "b", None, "", 2.0, instead_of="c") is None
    assert promote(LINE, "b", None, "", 3.0, instead_of="a") is not None
    again = promote(LINE, "b", None, "", 4.0, instead_of="a")
    assert again == ledger.promotions.current(LINE)
    assert [entry.checkpoint_id for entry in ledger.promotions.history(LINE)] == ["a", "b"]


def test_roll_back_of_a_checkpoint_that_is_gone_changes_nothing(ledger: Ledger) -> None:
    ledger.promotions.promote(LINE, "a", None, "", 1.0)
    ledger.promotions.promote(LINE, "b", None, "", 2.0)
    for _ in range(2):
        assert ledger.promotions.roll_back(LINE, "bad", 3.0, checkpoint_id="b").checkpoint_id == "a"


def test_roll_back_without_an_earlier_champion_is_refused(ledger: Ledger) -> None:
    with pytest.raises(StorageError, match="from checkpoint None: no champion before it"):
        ledger.promotions.roll_back(LINE, "bad", 1.0)
    ledger.promotions.promote(LINE, "only", None, "", 1.0)
    with pytest.raises(StorageError, match="from checkpoint only: no champion before it"):
        ledger.promotions.roll_back(LINE, "bad", 1.0)


def test_lines_have_champions_of_their_own(ledger: Ledger) -> None:
    ledger.promotions.promote(LINE, "a", None, "", 1.0)
    ledger.promotions.promote("tests", "t", None, "", 2.0)

    current = ledger.promotions.current(LINE)
    assert current is not None
    assert current.checkpoint_id == "a"
    assert ledger.promotions.lines() == [LINE, "tests"]
    with pytest.raises(StorageError, match="line tests from checkpoint t: no champion before it"):
        ledger.promotions.roll_back("tests", "bad", 3.0)
