"""The life of a group and the accounting of trajectories."""

import pytest

from ostinato.tasks.records import Branch, Outcome
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.slots import GroupSlot, GroupState, GroupTable, reward_spread
from ostinato.tasks.rollout.staleness import StalenessPolicy
from tests.fakes.rollouts import make_problem, make_trajectory


def make_table(cap: int = 1, size: int = 1, *, least_spread: float = 0.0) -> GroupTable:
    return GroupTable(StalenessPolicy(cap, size), least_spread=least_spread)


def open_group(table: GroupTable, name: str, birth: int = 0) -> None:
    table.open(GroupSlot(name, f"problem-{name}", birth, 0.0, trajectories_expected=2))


def attempt(name: str, number: int) -> AttemptRequest:
    return AttemptRequest(f"{name}.t{number}", name, make_problem(f"problem-{name}"), number, 0, 1)


def complete(
    table: GroupTable,
    name: str,
    birth: int = 0,
    solved: tuple[bool, bool] = (True, False),
) -> None:
    for number, good in enumerate(solved):
        table.finish(make_trajectory(attempt(name, number), versions=(birth,), solved=good))


def test_group_is_ready_only_when_every_member_is_there() -> None:
    table = make_table()
    open_group(table, "a")
    assert table.finish(make_trajectory(attempt("a", 1))) is None
    assert table.next_batch(0).waits_for == "ready groups"
    slot = table.finish(make_trajectory(attempt("a", 0)))
    assert slot is not None
    assert slot.state is GroupState.READY
    assert [member.attempt for member in slot.group.trajectories] == [0, 1]


def test_trunk_that_nothing_branched_off_gives_its_group_no_spread() -> None:
    table = make_table(least_spread=0.1)
    table.open(GroupSlot("a", "problem-a", 0, 0.0, trajectories_expected=3))
    trunk = make_trajectory(attempt("a", 0), solved=True)
    table.finish(trunk.model_copy(update={"branch": Branch(turns=len(trunk.transcript.turns))}))
    table.finish(make_trajectory(attempt("a", 1), solved=False))
    slot = table.finish(make_trajectory(attempt("a", 2), solved=False))
    assert slot is not None
    assert reward_spread(slot.group) == 0
    assert not slot.fills_step


def test_member_that_finishes_twice_is_refused() -> None:
    table = make_table()
    open_group(table, "a")
    table.finish(make_trajectory(attempt("a", 0)))
    with pytest.raises(ValueError, match="finished twice"):
        table.finish(make_trajectory(attempt("a", 0)))


def test_group_left_with_one_member_by_infrastructure_fails() -> None:
    table = make_table()
    open_group(table, "a")
    table.finish(make_trajectory(attempt("a", 0), outcome=Outcome.SANDBOX_FAILED))
    table.finish(make_trajectory(attempt("a", 1)))
    assert table.ended["failed"] == 1
    assert not table.groups


def test_attempts_lost_to_infrastructure_are_no_members() -> None:
    table = make_table()
    table.open(GroupSlot("a", "problem-a", 0, 0.0, trajectories_expected=3))
    for number, outcome in enumerate((Outcome.TIMED_OUT, Outcome.ENGINE_FAILED, Outcome.FINISHED)):
        slot = table.finish(make_trajectory(attempt("a", number), outcome=outcome))
    assert slot is not None
    assert [member.attempt for member in slot.group.trajectories] == [0, 2]


def test_step_takes_the_oldest_groups_first() -> None:
    table = make_table(cap=3)
    for name, birth in (("young", 2), ("old", 0)):
        open_group(table, name, birth)
        complete(table, name, birth)
    assert [slot.group_id for slot in table.next_batch(2).slots] == ["old"]


def test_step_is_held_for_a_group_that_would_become_stale() -> None:
    table = make_table(cap=1)
    open_group(table, "slow", 0)
    open_group(table, "fast", 1)
    complete(table, "fast", 1)
    held = table.next_batch(1)
    assert not held.slots
    assert held.late_groups == ("slow",)
    assert [slot.group_id for slot in table.next_batch(1, pace=False).slots] == ["fast"]
    complete(table, "slow", 0)
    assert [slot.group_id for slot in table.next_batch(1).slots] == ["slow"]


def test_group_past_the_bound_is_stale() -> None:
    table = make_table(cap=1)
    open_group(table, "a", 0)
    complete(table, "a", 0)
    assert not table.stale(1)
    assert [slot.group_id for slot in table.stale(2)] == ["a"]


def test_groups_without_spread_ride_with_a_step_and_do_not_fill_it() -> None:
    table = make_table(cap=3, least_spread=0.1)
    open_group(table, "flat")
    complete(table, "flat", solved=(True, True))
    assert table.next_batch(0).detail == "has 0, wants 1"
    open_group(table, "mixed")
    complete(table, "mixed")
    assert {slot.group_id for slot in table.next_batch(0).slots} == {"flat", "mixed"}


def test_ready_group_on_its_last_version_rides_with_a_full_step() -> None:
    table = make_table(cap=1)
    for name in ("a", "b", "c"):
        open_group(table, name, 0)
        complete(table, name, 0)
    assert [slot.group_id for slot in table.next_batch(1).slots] == ["a", "b", "c"]


def test_birth_version_is_the_oldest_token_of_the_group() -> None:
    table = make_table(cap=4)
    open_group(table, "a", 0)
    complete(table, "a", birth=3)
    assert table.next_batch(3).slots[0].birth_version == 3
