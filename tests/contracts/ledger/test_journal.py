"""Promise 4: reserve, finish, commit, train; each once, whatever is repeated."""

import pytest

from ostinato.infra.platform.errors import StorageError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.ledger.journal import Finish, JournalRepository, Reservation


def _reservation(trajectory_id: str, group_id: str = "g", weight_version: int = 3) -> Reservation:
    return Reservation(
        group_id=group_id,
        trajectory_id=trajectory_id,
        problem_id="problem",
        weight_version=weight_version,
    )


def _reserve(journal: JournalRepository, group_id: str, num_trajectories: int = 2) -> list[str]:
    names = [f"{group_id}-t{number}" for number in range(num_trajectories)]
    journal.reserve("run", [_reservation(name, group_id) for name in names])
    return names


def _end(trajectory_id: str, outcome: str, reason: str, reward: float, key: str | None) -> Finish:
    return Finish(
        trajectory_id=trajectory_id, outcome=outcome, reason=reason, reward=reward, object_key=key
    )


def _finish(journal: JournalRepository, names: list[str]) -> None:
    journal.finish(
        [_end(name, "finished", "answered", 0.5, f"trajectories/{name}") for name in names]
    )


def _commit(journal: JournalRepository, group_id: str) -> None:
    _finish(journal, _reserve(journal, group_id))
    journal.commit_group(group_id)


def test_a_trajectory_keeps_what_was_noted(ledger: Ledger) -> None:
    journal = ledger.journal
    journal.reserve("run", [_reservation("t", weight_version=7)])
    journal.finish([_end("t", "truncated", "token limit", -0.25, "trajectories/t")])
    journal.commit_group("g")

    (row,) = journal.committed_untrained("run")
    assert (row.problem_id, row.weight_version) == ("problem", 7)
    assert (row.outcome, row.reason, row.reward) == ("truncated", "token limit", -0.25)
    assert row.object_key == "trajectories/t"


def test_every_call_repeated_changes_nothing(ledger: Ledger) -> None:
    journal = ledger.journal
    for _ in range(2):
        names = _reserve(journal, "g")
    for _ in range(2):
        _finish(journal, names)
    for _ in range(2):
        journal.commit_group("g")
    before = journal.rows("run")
    journal.finish([_end(names[0], "broken", "a late worker", -1.0, None)])
    _reserve(journal, "g")
    assert journal.rows("run") == before

    for _ in range(2):
        journal.mark_trained(["g"], step=5)
    assert journal.counts("run") == {
        "reserved": 0,
        "finished": 0,
        "committed": 0,
        "trained": 2,
        "discarded": 0,
    }


def test_groups_come_in_commit_order(ledger: Ledger) -> None:
    for group_id in ("z", "a", "m"):
        _commit(ledger.journal, group_id)

    rows = ledger.journal.committed_untrained("run")
    assert [row.group_id for row in rows] == ["z", "z", "a", "a", "m", "m"]


def test_group_with_a_reserved_trajectory_cannot_be_committed(ledger: Ledger) -> None:
    names = _reserve(ledger.journal, "g", 3)
    _finish(ledger.journal, names[:2])

    with pytest.raises(StorageError, match="group g cannot be committed: 1 of 3"):
        ledger.journal.commit_group("g")
    assert ledger.journal.committed_untrained("run") == []
    assert [row.trajectory_id for row in ledger.journal.finished_uncommitted("run")] == names[:2]


def test_training_a_group_at_two_steps_is_refused_and_changes_nothing(ledger: Ledger) -> None:
    _commit(ledger.journal, "g")
    _commit(ledger.journal, "h")
    ledger.journal.mark_trained(["g"], step=5)

    with pytest.raises(StorageError, match="group g was trained at step 5 and now again at step 6"):
        ledger.journal.mark_trained(["h", "g"], step=6)
    assert ledger.journal.counts("run")["committed"] == 2


def test_finish_of_an_unknown_trajectory_is_refused(ledger: Ledger) -> None:
    with pytest.raises(StorageError, match=r"not reserved \(first: nobody\)"):
        ledger.journal.finish([_end("nobody", "finished", "", 0.0, None)])


def test_restart_from_a_checkpoint_owes_what_was_trained_after_it(ledger: Ledger) -> None:
    journal = ledger.journal
    for step, group_id in enumerate(["a", "b", "c"], start=1):
        _commit(journal, group_id)
        journal.mark_trained([group_id], step=step)
    _commit(journal, "d")

    assert journal.reopen_after("run", 2) == 2
    assert journal.reopen_after("run", 2) == 0
    assert {row.group_id for row in journal.committed_untrained("run")} == {"c", "d"}
    journal.mark_trained(["c", "d"], step=3)
    assert journal.counts("run")["trained"] == 8


def test_release_forgets_reserved_only_and_lets_them_be_reserved_again(ledger: Ledger) -> None:
    names = _reserve(ledger.journal, "g")
    _finish(ledger.journal, names[:1])
    ledger.journal.reserve("other run", [_reservation("other-t", "other")])

    assert ledger.journal.release_reserved("run") == 1
    assert ledger.journal.counts("other run")["reserved"] == 1
    _finish(ledger.journal, _reserve(ledger.journal, "g"))
    ledger.journal.commit_group("g")
    assert len(ledger.journal.committed_untrained("run")) == 2


def test_discarded_groups_are_never_owed(ledger: Ledger) -> None:
    _commit(ledger.journal, "g")
    ledger.journal.discard_groups(["g"], "staleness 9, wanted at most 4")
    ledger.journal.mark_trained(["g"], step=1)

    assert ledger.journal.committed_untrained("run") == []
    (row, _) = ledger.journal.rows("run")
    assert (row.state, row.reason) == ("discarded", "staleness 9, wanted at most 4")


def test_more_ids_than_one_query_takes(ledger: Ledger) -> None:
    names = _reserve(ledger.journal, "wide", 1200)
    _finish(ledger.journal, names)
    ledger.journal.commit_group("wide")

    assert len(ledger.journal.committed_untrained("run")) == 1200
