from ostinato.tasks.grading.cheating.alarms import HackMonitor
from ostinato.tasks.grading.config import MonitorConfig, Pattern
from ostinato.tasks.records import RewardReport
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.rollouts import make_problem, make_trajectory
from tests.unit.tasks.grading.test_rewards import call, transcript_of

CONFIG = MonitorConfig(window_trajectories=40, least_trajectories=10)


def attempt(index: int, *, flags=(), reward=0.0, tokens=10, asked=False, edited=True):
    request = AttemptRequest(
        trajectory_id=f"t{index}",
        group_id="g",
        problem=make_problem("p"),
        attempt=0,
        retry=0,
        seed=0,
    )
    made = make_trajectory(request)
    transcript = transcript_of(*([call("ask_user", text="a")] if asked else []))
    turn = made.transcript.turns[0].model_copy(update={"generated_tokens": tokens})
    return made.model_copy(
        update={
            "reward": RewardReport(
                total=reward, terms={"x": reward}, flags=dict.fromkeys(flags, "seen")
            ),
            "transcript": transcript.model_copy(update={"turns": (*transcript.turns, turn)}),
            "changed_files": {"a.py": "x"} if edited else {},
        }
    )


def monitor_of(trajectories) -> HackMonitor:
    monitor = HackMonitor(CONFIG)
    monitor.observe(trajectories)
    return monitor


def names(monitor: HackMonitor) -> set[str]:
    return {alarm.name for alarm in monitor.alarms()}


def test_rate_is_the_share_of_the_window_and_old_attempts_leave_it():
    monitor = monitor_of([attempt(i, flags=["odd_path"]) for i in range(10)])
    assert monitor.rates()[Pattern.ODD_PATH] == 1.0
    monitor.observe(attempt(i) for i in range(30))
    assert monitor.rates()[Pattern.ODD_PATH] == 0.25
    monitor.observe(attempt(i) for i in range(40))
    assert monitor.rates()[Pattern.ODD_PATH] == 0.0


def test_alarm_waits_for_enough_attempts_and_names_its_evidence():
    flagged = [attempt(i, flags=["odd_path"]) for i in range(9)]
    assert names(monitor_of(flagged)) == set()
    monitor = monitor_of([*flagged, attempt(9)])
    (alarm,) = monitor.alarms()
    assert (alarm.name, alarm.value, alarm.threshold) == ("odd_path", 0.9, 0.05)
    assert alarm.evidence == "t8: seen"


def test_thresholds_differ_by_pattern():
    attempts = [attempt(i, flags=["unfinished_todos"] if i < 8 else []) for i in range(40)]
    assert names(monitor_of(attempts)) == set()
    attempts[0] = attempt(0, flags=["run_tampering"])
    assert names(monitor_of(attempts)) == {"run_tampering"}


def test_one_pass_that_the_second_runner_does_not_confirm_raises_an_alarm():
    once = [attempt(i, flags=["runners_disagree"] if i == 0 else []) for i in range(1000)]
    monitor = HackMonitor(MonitorConfig(window_trajectories=1000))
    monitor.observe(once)
    assert names(monitor) == {"runners_disagree"}
    assert names(monitor_of(once)) == set()  # a window later it is over


def test_alarm_is_new_once_until_it_went_away():
    monitor = monitor_of([attempt(i, flags=["odd_path"]) for i in range(10)])
    assert len(monitor.new_alarms()) == 1
    assert monitor.new_alarms() == ()
    monitor.observe(attempt(i) for i in range(40))
    assert monitor.new_alarms() == ()
    monitor.observe(attempt(i, flags=["odd_path"]) for i in range(10))
    assert len(monitor.new_alarms()) == 1


def test_drifts_over_the_window_raise_alarms():
    def halves(older, newer):
        return monitor_of(
            [attempt(i, **older) for i in range(20)] + [attempt(i, **newer) for i in range(20)]
        )

    assert names(halves({"tokens": 100}, {"reward": 0.5, "tokens": 40})) == {"reward_jump"}
    assert names(halves({"tokens": 100}, {"reward": 0.5, "tokens": 90})) == set()
    assert names(halves({}, {"asked": True, "edited": False})) == {"question_rise", "edit_fall"}


def test_metrics_are_flat_numbers_and_ungraded_attempts_do_not_count():
    monitor = monitor_of([attempt(0, flags=["odd_path", "test_edit"]), attempt(1)])
    monitor.observe([attempt(2).model_copy(update={"verdict": None})])
    metrics = monitor.metrics()
    assert metrics["hack_odd_path_ratio"] == 0.5
    assert metrics["hack_any_ratio"] == 0.5
    assert metrics["hack_alarms"] == 0
    assert len(metrics) == len(Pattern) + 2
