"""The policy of examples/suggestion_policy.py learns when to show a suggestion, and its cycle survives kills."""

import itertools
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from examples.suggestion_policy import (
    EXPLORED,
    Choice,
    Policy,
    Rewards,
    SuggestionLine,
    arm_of,
    gate,
    main,
    make_event,
)
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger.rows import FeedbackRow, InteractionRow
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.serving.gateway.signals import Signal
from ostinato.tasks.realtime.promotion.guard import Advice
from tests.benchmarks.suggestions import (
    ALWAYS,
    KINDS,
    LEARNT,
    ORACLE,
    PLACEBO,
    REWARDS,
    Learner,
    LedgerRun,
    Users,
    events_of,
    first_policy,
    run_seed,
)

ROUNDS, SESSIONS = 4, 200


@pytest.fixture(scope="module")
def learnt() -> Policy:
    learner, users = Learner(0), Users(0)
    for _ in range(3):
        seen = users.bring(SESSIONS)
        learner.learn(seen, learner.choose(seen))
    return learner.policy


def contrary(policy: Policy) -> Policy:
    return Policy(weights_F=tuple(-weight for weight in policy.weights_F))


def test_published_rewards_pay_above_one_acceptance_in_four() -> None:
    assert REWARDS.threshold == 0.25


@given(st.floats(0.01, 100), st.floats(-100, -0.01), st.floats(0, 1))
def test_showing_pays_exactly_above_the_threshold(
    accepted: float, rejected: float, acceptance: float
) -> None:
    rewards = Rewards(accepted=accepted, rejected=rejected)
    expected = acceptance * accepted + (1 - acceptance) * rejected
    assert 0 < rewards.threshold < 1
    if abs(acceptance - rewards.threshold) > 1e-9:
        assert (expected > 0) == (acceptance > rewards.threshold)


@pytest.mark.parametrize("field", ["accepted", "rejected"])
@pytest.mark.parametrize("value", [0.0, float("nan"), None])
def test_rewards_without_a_threshold_are_refused(field: str, value: float | None) -> None:
    wrong_sign = -getattr(REWARDS, field)
    with pytest.raises(ValidationError, match=field):
        Rewards.model_validate({field: wrong_sign if value is None else value})


def test_script_refuses_such_rewards_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["suggestion_policy.py", "--rejected", "0.25"])
    with pytest.raises(SystemExit):
        main()
    assert "--rejected is 0.25" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_policy_learns_and_placebo_does_not() -> None:
    runs = [run_seed(seed, ROUNDS, SESSIONS) for seed in (0, 1)]
    for run in runs:
        last = run.rounds[-1]
        best, always = last[ORACLE]["reward"], last[ALWAYS]["reward"]
        assert last[LEARNT]["reward"] - always > 0.5 * (best - always)
        assert last[LEARNT]["shown"] < 0.8
        assert last[LEARNT]["rate"] > 1.28 * last[ALWAYS]["rate"]
        assert last[PLACEBO]["reward"] - always < 0.2 * (best - always)


def choices_of(policy: Policy, sessions: int) -> tuple[list[Choice], np.ndarray, np.ndarray]:
    seen = Users(3).bring(sessions)
    kinds = [KINDS[kind] for kind in seen.kinds_N]
    made = policy.choose(kinds, seen.features_NF, np.random.default_rng(0))
    return made, seen.features_NF, seen.acceptance_N


def test_each_choice_keeps_its_probability() -> None:
    policy = first_policy()
    made, features_NF, _ = choices_of(policy, 50)
    show_N = policy.probabilities(features_NF)
    assert show_N.min() >= EXPLORED
    assert show_N.max() <= 1 - EXPLORED
    for choice, show in zip(made, show_N, strict=True):
        assert choice.probability == pytest.approx(show if choice.shown else 1 - show)


def test_learning_weights_a_choice_by_how_much_likelier_it_is_now() -> None:
    policy = first_policy()
    (choice, *_), _, _ = choices_of(policy, 1)
    rarer = choice.model_copy(update={"probability": choice.probability / 2})
    start = np.array(policy.weights_F)
    steps = [
        np.array(policy.learn([one], [1.0], np.random.default_rng(0)).weights_F) - start
        for one in (choice, rarer)
    ]
    assert np.abs(steps[0]).max() > 0
    np.testing.assert_allclose(steps[1], 2 * steps[0], rtol=1e-6)


def test_gate_estimates_what_a_candidate_would_earn(learnt: Policy) -> None:
    policy, seen = first_policy(), Users(0).bring(1_000)
    kinds = [KINDS[kind] for kind in seen.kinds_N]
    made = policy.choose(kinds, seen.features_NF, np.random.default_rng(1))
    events = events_of(seen, made)
    show_N = {one: one.probabilities(seen.features_NF) for one in (policy, learnt)}
    gains_N = seen.acceptance_N - REWARDS.threshold
    true = float(((show_N[learnt] - show_N[policy]) * gains_N).mean())
    decision = gate(policy, learnt, events, "better")
    assert decision.passed
    assert abs(decision.difference.mean - true) < 0.01
    assert gate(policy, policy, events, "same").passed
    assert not gate(policy, contrary(learnt), events, "worse").passed


def stored_row(*signals: tuple[Signal, float]) -> InteractionRow:
    said = tuple(
        FeedbackRow(
            feedback_id=signal, interaction_id="s/0", signal=signal, value=1.0, created_at=at
        )
        for signal, at in signals
    )
    return InteractionRow(
        sequence=1,
        interaction_id="s/0",
        line="suggestions",
        tenant="people",
        session_id="s",
        arm="control",
        checkpoint_id="policy",
        weight_version=0,
        problem_kind="kind",
        consent=True,
        object_key="key",
        created_at=0.0,
        feedback=said,
    )


@pytest.mark.parametrize(
    ("signals", "shown", "reward"),
    [
        ([], False, 0.0),
        ([(Signal.EDIT_KEPT, 1.0)], True, 0.75),
        ([(Signal.EDIT_REVERTED, 1.0)], True, -0.25),
        ([], True, -0.25),  # ignored
        ([(Signal.EDIT_KEPT, 1.0), (Signal.EDIT_REVERTED, 2.0)], True, -0.25),
        ([(Signal.EDIT_REVERTED, 1.0), (Signal.EDIT_KEPT, 2.0)], True, 0.75),
    ],
)
def test_reward_follows_the_last_signal(
    signals: list[tuple[Signal, float]], shown: bool, reward: float
) -> None:
    choice = Choice(kind="kind", features_F=(1.0,), shown=shown, probability=0.5)
    assert make_event(stored_row(*signals), choice, REWARDS).reward == reward


class Killed(Exception):
    """Stands for a kill."""


class FatalClock:
    """A clock that kills its caller at a call."""

    def __init__(self, now: float, calls: int) -> None:
        self.now, self._left = now, calls

    def __call__(self) -> float:
        self._left -= 1
        if self._left < 0:
            raise Killed
        return self.now


def test_killed_cycle_goes_on_with_the_same_candidate(tmp_path: Path) -> None:
    served = LedgerRun(tmp_path / "served")
    served.line.start(first_policy())
    served.serve(60)
    served.ledger.close()
    candidates, killed = [], []
    for calls in (100, 0, 1, 2, 3):
        folder = tmp_path / f"killed-{calls}"
        shutil.copytree(tmp_path / "served", folder)
        run = LedgerRun(folder)
        objects = ObjectStore.from_url(f"file://{folder}/objects")
        clock = FatalClock(served.clock.now, calls)
        try:
            SuggestionLine(run.ledger, objects, "suggestions", clock).run_cycle(REWARDS)
        except Killed:
            killed.append(calls)
            (row, *_) = run.ledger.interactions.since(0)
            late = FeedbackRow(
                feedback_id="late",
                interaction_id=row.interaction_id,
                signal=Signal.EDIT_REVERTED,
                value=1.0,
                created_at=served.clock.now + 10.0,
            )
            run.ledger.interactions.add_feedback(late)
            run.clock.now = served.clock.now
            run.line.run_cycle(REWARDS)
        (cycle,) = run.ledger.cycles.history("suggestions")
        assert cycle.outcome == "canary"
        canary = run.line.serving.canary()
        assert canary is not None
        candidates.append(canary.checkpoint_id)
        run.clock.now = served.clock.now
        assert run.line.run_cycle(REWARDS).startswith("waits")
        run.ledger.close()
    assert killed == [0, 1, 2, 3]  # before it opens, twice while its canary opens, before it closes
    assert len(set(candidates)) == 1


def test_guard_withdraws_a_policy_that_shows_what_users_reject(
    tmp_path: Path, learnt: Policy
) -> None:
    run = LedgerRun(tmp_path)
    run.line.start(contrary(learnt))  # so that its files are stored
    run.ledger.promotions.promote("suggestions", learnt.name, None, "better", 1.0)
    run.line.start(learnt)
    decision = gate(learnt, contrary(learnt), events_of_one_round(learnt), "bad")
    run.line.serving.start_canary(decision.model_copy(update={"passed": True}), 0.5)
    run.serve(120)
    assert list(run.line.arms()) == ["control"]
    end = run.line.serving.last_end()
    assert end is not None
    assert end.advice is Advice.ROLL_BACK
    assert run.line.serving.champion() == learnt.name


def events_of_one_round(policy: Policy) -> list:
    seen = Users(0).bring(20)
    kinds = [KINDS[kind] for kind in seen.kinds_N]
    return events_of(seen, policy.choose(kinds, seen.features_NF, np.random.default_rng(0)))


def test_each_of_two_canaries_in_a_row_is_promoted(tmp_path: Path) -> None:
    run, generator = LedgerRun(tmp_path), np.random.default_rng(0)
    policies = [Policy(weights_F=(weight,)) for weight in (4.0, 4.1, 4.2)]
    run.line.start(policies[0])
    choice = Choice(kind="kind", features_F=(1.0,), shown=True, probability=0.9)
    event = make_event(stored_row((Signal.EDIT_KEPT, 1.0)), choice, REWARDS)
    for before, after in itertools.pairwise(policies):
        run.line.start(after)  # stores it
        run.line.serving.start_canary(gate(before, after, [event], after.name), 0.5)
        arms = run.line.arms()
        for number in range(200):
            name = f"{after.name}-{number}"
            arm = arm_of(name, arms)
            made = arms[arm].choose(["kind"], np.ones((1, 1)), generator)
            (interaction,) = run.line.record(name, "people", arm, arms[arm], made)
            run.judge(interaction, is_good=True)
            run.clock.now += 36.0
        run.clock.now += 700.0
        assert list(run.line.arms()) == ["control"]
        assert run.line.serving.champion() == after.name


def test_session_is_recorded_once(tmp_path: Path) -> None:
    run, policy = LedgerRun(tmp_path), first_policy()
    made, _, _ = choices_of(policy, 1)
    names = run.line.record("s", "people", "control", policy, made)
    assert run.line.record("s", "people", "control", policy, made) == names
    assert len(run.ledger.interactions.since(0)) == len(made)
    with pytest.raises(ConfigError, match="session 's' has other choices"):
        run.line.record("s", "people", "control", policy, made[1:])


def test_line_without_a_policy_names_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no policy, wanted one: call `start`"):
        LedgerRun(tmp_path).line.arms()
