"""Drafting is chosen where it pays, by a simulated engine whose costs and acceptance are known."""

from dataclasses import dataclass, field

import numpy as np

from ostinato.models.decode.drafts.policy import DraftPolicy


@dataclass
class Simulation:
    """Decode steps of one request: seconds by draft layers, share of each layer's drafts that hold."""

    seconds: tuple[float, ...]  # of a step with 0, 1, ... layers
    shares: tuple[float, ...] = ()
    aftermath_seconds: float = 0.0  # that a plain step behind a drafting one takes more
    interrupted: tuple[int, ...] = ()  # steps that take 100 times as long
    layers: list[int] = field(default_factory=list)  # of each step
    total_seconds: float = 0.0
    total_tokens: int = 0

    def run(self, policy: DraftPolicy, steps: int, seed: int = 0) -> "Simulation":
        random = np.random.default_rng(seed)
        for _ in range(steps):
            is_measured = policy.should_measure(1)
            layers = 0
            if is_measured and policy.should_draft(1):
                layers = policy.choose_layers(1, 0.0)
                policy.count_proposal(1, has_drafts=layers > 0)
            held = 0
            while held < layers and random.random() < self.shares[held]:
                held += 1
            seconds = self.seconds[layers]
            if not layers and self.layers and self.layers[-1]:
                seconds += self.aftermath_seconds
            if len(self.layers) in self.interrupted:
                seconds *= 100
            if layers:
                policy.count_accepted(np.array([held]), layers)
            if is_measured:
                policy.record(1, layers, 0, seconds, 1 + held)
            self.layers.append(layers)
            self.total_seconds += seconds
            self.total_tokens += 1 + held
        return self

    @property
    def speed_up(self) -> float:
        return self.total_tokens * self.seconds[0] / self.total_seconds


def test_drafts_are_made_when_they_pay() -> None:
    world = Simulation((1.0, 1.2, 1.5), (0.6, 0.9)).run(DraftPolicy(2, 8, 0), 2000)
    assert world.layers.count(2) > 1800


def test_the_number_of_layers_is_the_one_that_pays_most() -> None:
    world = Simulation((1.0, 1.2, 2.4), (0.8, 0.3)).run(DraftPolicy(2, 8, 0), 2000)
    assert world.layers[500:].count(1) > 1300


def test_drafts_that_do_not_pay_stop_and_are_tried_ever_less() -> None:
    world = Simulation((1.0, 1.4, 1.9), (0.3, 0.3)).run(DraftPolicy(2, 8, 0), 8000)
    assert world.speed_up > 0.97
    tried = np.flatnonzero(world.layers)
    assert tried[-1] > 500  # once more, later
    assert np.count_nonzero(world.layers[-2000:]) < 20


def test_layers_that_got_better_are_found_again() -> None:
    policy = DraftPolicy(1, 8, 0)
    Simulation((1.0, 1.5), (0.2,)).run(policy, 1000)
    world = Simulation((1.0, 1.2), (0.8,)).run(policy, 20_000)
    assert world.layers[-1000:].count(1) > 900


def test_drafts_that_slow_the_steps_behind_them_are_charged_for_them() -> None:
    """Each draft step looks cheap by itself: without drafts a plain step is cheaper."""
    world = Simulation((1.0, 1.25), (0.2,), aftermath_seconds=0.4).run(DraftPolicy(1, 8, 0), 4000)
    assert np.count_nonzero(world.layers[-500:]) < 25


def test_one_interrupted_step_decides_nothing() -> None:
    world = Simulation((1.0, 1.5), (0.95,), interrupted=(5, 12, 70)).run(DraftPolicy(1, 8, 0), 600)
    assert world.layers[-100:].count(1) > 80


def test_copies_that_slow_decoding_down_pause() -> None:
    """The lookup promises more than it holds: only the comparison with plain stretches tells."""
    policy, drafting = DraftPolicy(0, 8, 4), []
    for _ in range(8000):
        is_measured = policy.should_measure(1)
        is_drafting = is_measured and policy.should_draft(1)
        if is_drafting:
            policy.count_proposal(1, has_drafts=True)
        if is_measured:
            policy.record(1, 0, 2 if is_drafting else 0, 1.2 if is_drafting else 1.0, 1)
        drafting.append(is_drafting)
    assert sum(drafting[2000:]) < 200


def test_where_nothing_is_found_most_steps_are_not_measured() -> None:
    policy, measured = DraftPolicy(0, 8, 4), 0
    for _ in range(2000):
        if not policy.should_measure(1):
            continue
        measured += 1
        if policy.should_draft(1):
            policy.count_proposal(1, has_drafts=False)
        policy.record(1, 0, 0, 1.0, 1)
    assert measured < 400


def test_large_batches_never_draft() -> None:
    assert not DraftPolicy(2, 8, 0).should_measure(9)
