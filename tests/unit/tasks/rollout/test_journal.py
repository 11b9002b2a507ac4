"""Exactly once: rows in a real ledger, payloads in a real object store."""

from pathlib import Path

import numpy as np
import pytest

from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.tasks.records import Group, Outcome
from ostinato.tasks.rollout.config import CurriculumConfig
from ostinato.tasks.rollout.curriculum import Curriculum
from ostinato.tasks.rollout.journal import RolloutJournal
from ostinato.tasks.rollout.payload import group_from_bytes, group_to_bytes
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.slots import oldest_version
from tests.fakes.rollouts import make_problem, make_trajectory


def requests_of(name: str) -> list[AttemptRequest]:
    group = f"run.g{name}"
    return [
        AttemptRequest(f"{group}.t{attempt}", group, make_problem("p0"), attempt, 0, 7)
        for attempt in range(2)
    ]


def group_of(name: str) -> Group:
    members = tuple(
        make_trajectory(request, versions=(3, 4), solved=request.attempt == 0)
        for request in requests_of(name)
    )
    return Group(group_id=members[0].group_id, problem_id="p0", trajectories=members)


@pytest.fixture
def journal(tmp_path: Path) -> RolloutJournal:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db").migrate()
    return RolloutJournal(ledger.journal, ObjectStore.from_url(f"file://{tmp_path}/objects"), "run")


def commit(journal: RolloutJournal, name: str) -> Group:
    journal.reserve(requests_of(name), weight_version=3)
    journal.commit(group_of(name))
    return group_of(name)


def test_group_survives_its_byte_form() -> None:
    group = group_of("000000")
    again = group_from_bytes(group_to_bytes(group))
    for before, after in zip(group.trajectories, again.trajectories, strict=True):
        assert before.model_dump(exclude={"transcript"}) == after.model_dump(exclude={"transcript"})
        ours, theirs = before.transcript.segments[0], after.transcript.segments[0]
        assert np.array_equal(ours.token_ids_T, theirs.token_ids_T)
        assert np.array_equal(ours.routed_experts_TLK, theirs.routed_experts_TLK)


def test_committed_group_is_owed_after_a_restart_and_what_was_in_flight_is_not(
    journal: RolloutJournal,
) -> None:
    commit(journal, "000000")
    journal.reserve(requests_of("000001"), weight_version=3)
    owed = journal.restore(checkpoint_step=0)
    assert [item.group.group_id for item in owed] == ["run.g000000"]
    assert journal.counts()["reserved"] == 0


def test_group_is_as_old_after_a_restart_as_before(journal: RolloutJournal) -> None:
    """Its attempts waited for a slot while the engines got a newer version."""
    journal.reserve(requests_of("000000"), weight_version=1)
    journal.commit(group_of("000000"))
    (owed,) = journal.restore(checkpoint_step=0)
    assert owed.birth_version == oldest_version(owed.group) == 3


def test_group_trained_at_a_kept_step_is_never_owed_again(
    journal: RolloutJournal,
) -> None:
    commit(journal, "000000")
    journal.mark_trained(["run.g000000"], step=1)
    assert journal.restore(checkpoint_step=1) == []


def test_group_trained_after_the_checkpoint_is_owed_again(
    journal: RolloutJournal,
) -> None:
    commit(journal, "000000")
    journal.mark_trained(["run.g000000"], step=2)
    assert len(journal.restore(checkpoint_step=1)) == 1
    journal.mark_trained(["run.g000000"], step=2)
    assert journal.restore(checkpoint_step=2) == []


def test_group_cut_off_between_finish_and_commit_is_discarded_with_a_reason(
    journal: RolloutJournal,
) -> None:
    requests = requests_of("000000")
    journal.reserve(requests, weight_version=3)
    journal.fail(make_trajectory(requests[0], outcome=Outcome.SANDBOX_FAILED))
    assert journal.restore(checkpoint_step=0) == []
    assert journal.counts() == {
        "reserved": 0, "finished": 0, "committed": 0, "trained": 0, "discarded": 1,
    }  # fmt: skip


def test_problem_of_a_group_cut_off_by_a_kill_is_drawn_again_under_another_number(
    journal: RolloutJournal,
) -> None:
    """Also if one of its attempts had already failed and waited for its retry."""
    requests = requests_of("000000")
    journal.reserve(requests, weight_version=3)
    journal.fail(make_trajectory(requests[0], outcome=Outcome.SANDBOX_FAILED))
    journal.restore(checkpoint_step=0)
    config = CurriculumConfig()
    curriculum = Curriculum([requests[0].problem], config, group_size=2, seed=0)
    curriculum.resume(journal.drawn())
    assert curriculum.draws == 1
    assert not curriculum.is_exhausted
    assert curriculum.draw(()).problem_id == "p0"


def test_stale_group_is_never_owed(journal: RolloutJournal) -> None:
    group = commit(journal, "000000")
    journal.retire(group, "staleness 3, wanted at most 2")
    assert journal.restore(checkpoint_step=0) == []


def test_group_numbers_continue_after_a_restart(journal: RolloutJournal) -> None:
    assert journal.drawn() == {}
    commit(journal, "000000")
    commit(journal, "000004")
    assert journal.drawn() == {0: "p0", 4: "p0"}
