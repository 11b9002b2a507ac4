"""The orchestrator against scripted attempts and steps, on a virtual clock."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ostinato.infra.platform.errors import ClusterError, ConfigError, EngineError, StorageError
from ostinato.infra.platform.plugins import installed_entries
from ostinato.infra.platform.telemetry import read_lines
from ostinato.tasks.planning.simulation import run_virtual
from ostinato.tasks.records import Group, Outcome, Trajectory
from ostinato.tasks.rollout.config import CurriculumConfig, RolloutConfig, StalenessConfig
from ostinato.tasks.rollout.curriculum import Curriculum, GroupHistory
from ostinato.tasks.rollout.orchestrator import Limits, Orchestrator
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.steps import RunProgress, StepRequest
from tests.fakes.rollouts import MemoryJournal, make_problem, make_trajectory

Duration = Callable[[AttemptRequest], float]


class Script:
    """A run whose attempts last as told and whose steps last one second."""

    def __init__(
        self,
        duration: Duration,
        *,
        cap: int = 2,
        pace_seconds: float = 1000.0,
        steps: int = 6,
        revisit_groups: int = 1,
        groups_per_step: int = 2,
        admission: str = "expected",
        update_interval_steps: int = 1,
        **limits: float,
    ) -> None:
        self.duration = duration
        self.ages: list[int] = []
        self.trained: Counter[str] = Counter()
        self.steps: list[StepRequest] = []
        self.journal = MemoryJournal()
        config = RolloutConfig(
            group_size=2,
            groups_per_step=groups_per_step,
            concurrent_trajectories=8,
            least_spread=0.0,
            staleness=StalenessConfig(
                max_staleness_versions=cap,
                pace_limit_seconds=pace_seconds,
                admission=admission,
                update_interval_steps=update_interval_steps,
            ),
        )
        problems = [make_problem(f"p{index}") for index in range(12)]
        self.orchestrator = Orchestrator(
            "run",
            config,
            curriculum=Curriculum(
                problems,
                CurriculumConfig(revisit_groups=revisit_groups),
                group_size=2,
                seed=0,
            ),
            journal=self.journal,
            attempt=self.attempt,
            train=self.train,
            limits=Limits(max_steps=steps, **limits),
            progress=RunProgress(),
        )

    async def attempt(self, request: AttemptRequest) -> Trajectory:
        loop, progress = asyncio.get_running_loop(), self.orchestrator.progress
        started, first = loop.time(), progress.engine_version
        await asyncio.sleep(self.duration(request))
        versions = (first, progress.engine_version)
        return make_trajectory(
            request, versions=versions, started_at=started, finished_at=loop.time()
        )

    async def train(self, request: StepRequest) -> int:
        self.steps.append(request)
        for group in request.groups:
            self.trained[group.group_id] += 1
            oldest = min(
                member.transcript.segments[0].oldest_version for member in group.trajectories
            )
            self.ages.append(request.trainer_version - oldest)
        await asyncio.sleep(1.0)
        version = request.trainer_version + 1
        if self.orchestrator.config.staleness.updates_engines(request.step):
            asyncio.get_running_loop().call_later(0.1, self.orchestrator.engine_applied, version)
        return version

    def run(self) -> RunProgress:
        return run_virtual(self.orchestrator.run())


def heavy_tail(request: AttemptRequest) -> float:
    return random.Random(request.seed).lognormvariate(0, 1.5)


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_heavy_tails_train_every_group_once_within_the_bound(cap: int) -> None:
    script = Script(heavy_tail, cap=cap, steps=25)
    progress = script.run()
    assert progress.steps_done == 25
    assert max(script.ages) <= cap
    assert set(script.trained.values()) == {1}
    assert "stale" not in script.journal.ends.values()


@pytest.mark.parametrize("cap", [2, 3, 6])
def test_engines_that_follow_each_third_step_make_rollouts_older_and_never_stale(cap: int) -> None:
    script = Script(heavy_tail, cap=cap, steps=24, update_interval_steps=3)
    progress = script.run()
    assert progress.steps_done == 24
    assert {step.trainer_version - step.metrics["publish_lag"] for step in script.steps} <= set(
        range(0, 24, 3)
    )
    assert 2 <= max(script.ages) <= cap
    assert set(script.trained.values()) == {1}
    assert "stale" not in script.journal.ends.values()


def test_an_interval_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"update_interval_steps is 4, wanted at most 3"):
        StalenessConfig(max_staleness_versions=2, update_interval_steps=4)


def test_one_straggler_is_waited_for_and_trained() -> None:
    script = Script(
        lambda request: 30.0 if request.group_id.endswith("g000001") else 1.0,
        cap=2,
        steps=8,
    )
    script.run()
    assert script.trained["run.g000001"] == 1
    assert max(script.ages) <= 2


def second_group_is_slow(request: AttemptRequest) -> float:
    return 60.0 if request.group_id.endswith("g000001") else 1.0


def test_straggler_past_the_pace_limit_ends_as_stale_with_accounting() -> None:
    script = Script(second_group_is_slow, cap=1, pace_seconds=5.0, steps=80)
    script.run()
    assert script.journal.ends["run.g000001"] == "stale"
    table = script.orchestrator.table
    assert table.outcomes[Outcome.STALE.value] == 2
    assert script.orchestrator.attempts.dispatched == sum(table.outcomes.values()) + len(
        script.orchestrator.cancelled
    )


def test_generation_goes_on_while_a_step_runs() -> None:
    script = Script(lambda request: 1.0, cap=2, steps=10)
    script.run()
    assert script.orchestrator.progress.trainer_idle_seconds < 6.0


def test_infrastructure_failure_is_tried_again_under_a_new_id_and_never_rewarded() -> None:
    script = Script(lambda request: 1.0)
    scripted = script.attempt

    async def attempt(request: AttemptRequest) -> Trajectory:
        if request.attempt == 0 and request.retry == 0:
            return make_trajectory(request, outcome=Outcome.SANDBOX_FAILED)
        return await scripted(request)

    script.orchestrator.attempts._attempt = attempt
    script.run()
    members = [
        member for step in script.steps for group in step.groups for member in group.trajectories
    ]
    assert {member.outcome for member in members} == {Outcome.FINISHED}
    assert "run.g000000.t0" in script.journal.failed
    assert "run.g000000.t0.r1" in script.journal.reserved


def test_failures_without_end_stop_the_run_with_the_reason() -> None:
    script = Script(lambda request: 1.0)

    async def attempt(request: AttemptRequest) -> Trajectory:
        return make_trajectory(request, outcome=Outcome.ENGINE_FAILED)

    script.orchestrator.attempts._attempt = attempt
    with pytest.raises(ClusterError, match="4 groups in a row lost to infrastructure"):
        script.run()


def test_an_error_of_every_attempt_ends_the_run_and_is_named() -> None:
    script = Script(lambda request: 1.0)

    async def attempt(request: AttemptRequest) -> Trajectory:
        raise RuntimeError("no such attribute")

    script.orchestrator.attempts._attempt = attempt
    with pytest.raises(ClusterError, match=r"4 groups in a row .* RuntimeError: no such attribute"):
        script.run()


def as_fault(made: Trajectory) -> Trajectory:
    """The attempt as one whose dialogue was judged as a fault."""
    assert made.verdict is not None
    verdict = made.verdict.model_copy(update={"tampering": ("fault while grading: OSError",)})
    told = {"verdict": verdict, "outcome": Outcome.BROKEN, "reason": "fault: OSError: odd"}
    return made.model_copy(update=told)


def test_faults_in_every_group_are_trained_and_in_all_attempts_end_the_run() -> None:
    some = Script(lambda request: 1.0, steps=6)
    scripted = some.attempt

    async def attempt(request: AttemptRequest) -> Trajectory:
        made = await scripted(request)
        return as_fault(made) if request.attempt == 0 else made

    some.orchestrator.attempts._attempt = attempt
    assert some.run().steps_done == 6
    assert some.orchestrator.table.outcomes["broken"] >= 12

    every = Script(lambda request: 1.0)

    async def always(request: AttemptRequest) -> Trajectory:
        return as_fault(await every.attempt(request))

    every.orchestrator.attempts._attempt = always
    with pytest.raises(ClusterError, match=r"4 groups in a row .* fault: OSError: odd"):
        every.run()


def test_one_attempt_in_ten_that_raises_ends_no_run() -> None:
    script = Script(lambda request: 1.0, steps=12)
    scripted = script.attempt

    async def attempt(request: AttemptRequest) -> Trajectory:
        if request.seed % 10 == 0:
            raise OSError(39, "Directory not empty")
        return await scripted(request)

    script.orchestrator.attempts._attempt = attempt
    assert script.run().steps_done == 12


def test_budget_counts_earlier_processes() -> None:
    script = Script(lambda request: 1.0, steps=1000, budget_seconds=30.0, used_seconds=20.0)
    script.run()
    assert script.orchestrator.progress.steps_done < 12


def test_restored_groups_are_trained_first() -> None:
    script = Script(lambda request: 5.0, steps=1)
    donor = Script(lambda request: 1.0, steps=1)
    donor.run()
    groups = donor.steps[0].groups
    for group in groups:
        script.orchestrator.table.restore(
            group.model_copy(update={"group_id": f"old.{group.group_id}"}), 0
        )
    script.orchestrator.progress.groups_started = 100
    script.run()
    assert [group.group_id for group in script.steps[0].groups] == [
        f"old.{group.group_id}" for group in groups
    ]


def test_same_seed_replays_the_same_run() -> None:
    def history() -> list[tuple[str, ...]]:
        script = Script(heavy_tail, steps=8)
        script.run()
        return [tuple(group.group_id for group in step.groups) for step in script.steps]

    assert history() == history()


def test_status_names_what_the_trainer_waits_for() -> None:
    script = Script(lambda request: 1.0, steps=2)
    script.run()
    assert set(script.orchestrator.progress.waits) == {"trainer", "rollouts"}


@pytest.mark.parametrize("error", [EngineError("engines do not follow"), OSError("disk full")])
def test_any_failure_of_background_work_ends_a_run(error: Exception) -> None:
    script = Script(lambda request: 1.0, cap=0, steps=50)

    async def work() -> None:
        await asyncio.sleep(5.0)
        raise error

    async def train(request: StepRequest) -> int:
        script.orchestrator.start_background(work())
        return request.trainer_version + 1

    script.orchestrator.steps._train = train
    with pytest.raises(type(error), match=str(error)):
        script.run()


def test_a_resumed_curriculum_knows_every_committed_group(tmp_path: Path) -> None:
    script = Script(lambda request: 1.0)
    history = GroupHistory(tmp_path / "groups.jsonl")
    script.orchestrator.on_group = history.append
    script.run()
    problems = [make_problem(f"p{index}") for index in range(12)]
    fresh = Curriculum(problems, CurriculumConfig(), group_size=2, seed=0)
    committed = set(script.journal.ends)
    history = GroupHistory(tmp_path / "groups.jsonl")

    assert history.replay(fresh, committed) == len(committed) >= sum(script.trained.values()) > 0
    assert history.replay(fresh, committed - {min(committed)}) == len(committed) - 1


def test_a_result_is_in_the_history_before_its_group_is_committed(tmp_path: Path) -> None:
    """A kill at the commit leaves a line too many, which a resumed run does not count, and never one too few."""
    script = Script(lambda request: 1.0)
    history = GroupHistory(tmp_path / "groups.jsonl")
    script.orchestrator.on_group = history.append

    def killed(group: Group) -> None:
        raise StorageError("killed")

    script.journal.commit = killed
    with pytest.raises(StorageError, match="killed"):
        script.run()
    (line,) = read_lines(tmp_path / "groups.jsonl")
    assert line["group_id"] not in script.journal.ends
    fresh = Curriculum([make_problem("p0")], CurriculumConfig(), group_size=2, seed=0)
    assert history.replay(fresh, set(script.journal.ends)) == 0


@pytest.mark.parametrize("groups_per_step", [2, 5])
def test_a_single_epoch_trains_each_problem_once_and_ends_the_run(groups_per_step: int) -> None:
    script = Script(
        heavy_tail, steps=100, revisit_groups=0, groups_per_step=groups_per_step, pace_seconds=1e6
    )
    progress = script.run()
    trained = Counter(group.problem_id for step in script.steps for group in step.groups)
    assert trained == {f"p{index}": 1 for index in range(12)}
    assert progress.steps_done == -(-12 // groups_per_step)


def test_groups_start_when_the_trainer_will_want_them_and_not_as_early_as_the_bound_allows() -> (
    None
):
    def run(admission: str) -> tuple[float, float]:
        script = Script(quick, cap=4, steps=60, admission=admission)
        progress = script.run()
        assert max(script.ages) <= 4
        return sum(script.ages) / len(script.ages), progress.trainer_idle_seconds

    early_age, early_idle = run("cap")
    age, idle = run("expected")
    assert early_age > 3.0
    assert age < early_age - 1.0
    assert idle < early_idle + 2.0  # of 60 seconds of steps


ODD_ADMISSIONS = """
VALUES = {"nan": float("nan"), "text": "4", "none_yet": 0, "negative": -1, "half": 2.5, "true": True}
def __getattr__(name):
    return lambda estimate, groups_per_step: 1 // 0 if name == "fails" else VALUES[name]
"""


@pytest.mark.parametrize("name", ["nan", "text", "none_yet", "negative", "half", "true", "fails"])
def test_an_admission_that_counts_no_groups_ends_the_run_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_admissions.py").write_text(ODD_ADMISSIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    information = tmp_path / "odd_admissions-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        f"[ostinato.admissions]\n{name} = odd_admissions:{name}\n"
    )
    installed_entries.cache_clear()
    try:
        with pytest.raises(ConfigError, match=f"rollout.staleness.admission '{name}'"):
            Script(quick, admission=name).run()
    finally:
        installed_entries.cache_clear()


def quick(request: AttemptRequest) -> float:
    """Attempts of about half a step, which takes a second."""
    return random.Random(request.seed).uniform(0.3, 0.6)
