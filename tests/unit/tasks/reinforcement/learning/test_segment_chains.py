"""A trajectory of several segments: one reward for the whole chain, every sampled token trained,
summaries included.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from statistics import pstdev

import pytest

from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import Transcript
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.records import Group, RewardReport, Trajectory
from ostinato.tasks.reinforcement.learning.batches.advantages import (
    make_samples,
    penalize_divergence,
)
from ostinato.tasks.reinforcement.learning.batches.packing import pack
from ostinato.tasks.reinforcement.learning.config import ObjectiveConfig, PackingConfig
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.slots import reward_spread
from tests.fakes.memory_sandbox import MemorySandbox
from tests.fakes.rollouts import make_problem, make_trajectory
from tests.fakes.scripted_model import ScriptedModel

CONFIG = HarnessConfig(
    max_turns=20, context_tokens=400, max_generated_tokens=2000, summarise_at_tokens=90
)
PLAIN = ObjectiveConfig()
READ = "<read_file>a.py</read_file>"
SUMMARY = "a.py holds one line"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_tokenizer(["x = 1\n"], vocab_size=400))


def chain(renderer: Renderer, num_summaries: int) -> Transcript:
    answers = [f"{index}{READ}" for index in range(num_summaries)]
    answers = [text for read in answers for text in (read, SUMMARY)]
    return transcript_of(renderer, [*answers, "Done."])


def transcript_of(renderer: Renderer, answers: Sequence[str | Exception]) -> Transcript:
    sandbox = MemorySandbox({"a.py": b"x = 1\n" * 30})
    model = ScriptedModel(renderer, answers)
    request = AgentRequest(prompt="Fix a.py", session_id="s")
    return asyncio.run(run_agent(model, renderer, AgentEnvironment(sandbox), request, CONFIG))


@pytest.fixture(scope="module")
def group(renderer: Renderer) -> Group:
    trajectories = []
    for index, (num_summaries, reward) in enumerate([(2, 1.0), (0, 0.0), (1, 0.0), (0, 0.0)]):
        request = AttemptRequest(f"t{index}", "g", make_problem("p"), index, retry=0, seed=index)
        graded = make_trajectory(request)
        changes = {
            "transcript": chain(renderer, num_summaries),
            "reward": RewardReport(total=reward, terms={"solved": reward}),
        }
        trajectories.append(graded.model_copy(update=changes))
    return Group(group_id="g", problem_id="p", trajectories=tuple(trajectories))


def test_every_segment_is_a_sample_under_the_reward_of_the_whole_chain(group: Group) -> None:
    samples = make_samples(group, PLAIN)
    by_trajectory = {name: [s for s in samples if s.trajectory_id == name] for name in ("t0", "t2")}
    assert [len(each) for each in by_trajectory.values()] == [3, 2]
    assert {sample.advantage for sample in by_trajectory["t0"]} == {0.75}
    assert {sample.advantage for sample in by_trajectory["t2"]} == {-0.25}
    assert len({sample.sample_id for sample in samples}) == len(samples) == 7


def rewarded(group: Group, *segments: tuple[float, ...]) -> Group:
    """The group with rewards of the segments of its members, minus those of the members."""
    members = [
        member.model_copy(update={"reward": member.reward.model_copy(update={"segments": own})})
        for member, own in zip(group.trajectories, segments, strict=True)
    ]
    return group.model_copy(update={"trajectories": tuple(members)})


@pytest.mark.parametrize(
    "division", [{}, {"divide_by_deviation": True}, {"divide_by_length": True}]
)
def test_a_reward_of_one_segment_moves_its_advantage_alone(
    group: Group, division: dict[str, bool]
) -> None:
    objective = ObjectiveConfig.model_validate({"kl_coefficient": 0.1} | division)
    shared = make_samples(group, objective)
    parted = rewarded(group, (0.5, -0.25, -0.25), (), (0.0, 0.0), ())
    samples = make_samples(parted, objective)
    moved = [one.advantage - other.advantage for one, other in zip(samples, shared, strict=True)]
    scale = moved[0] / 0.5
    assert scale > 0
    assert moved == pytest.approx([0.5 * scale, -0.25 * scale, -0.25 * scale, 0, 0, 0, 0])
    # the penalty for divergence is the attempt's: the segment's part is divided as the penalised rewards are
    k1_nats = [0.3, 0.0, 0.1, 0.2, 0.0, 0.4, 0.0]
    after = penalize_divergence(samples, k1_nats, objective).advantages
    before = penalize_divergence(shared, k1_nats, objective).advantages
    moved = [one - other for one, other in zip(after, before, strict=True)]
    penalised = [1.0 - 0.1 * 0.4, -0.1 * 0.2, -0.1 * 0.4, 0.0]
    if "divide_by_deviation" in division:
        scale = 1 / pstdev(penalised)
    assert moved == pytest.approx([0.5 * scale, -0.25 * scale, -0.25 * scale, 0, 0, 0, 0])


def test_segments_of_equal_attempts_spread_a_group(group: Group) -> None:
    same = [
        member.model_copy(update={"reward": RewardReport(total=0.5, terms={"solved": 0.5})})
        for member in group.trajectories
    ]
    alike = group.model_copy(update={"trajectories": tuple(same)})
    assert reward_spread(alike) == 0
    parted = rewarded(alike, (0.5, -0.25, -0.25), (), (), ())
    assert reward_spread(parted) == pytest.approx(0.75)
    objective = ObjectiveConfig(divide_by_deviation=True)
    advantages = [sample.advantage for sample in make_samples(parted, objective)]
    assert advantages == pytest.approx([0.5, -0.25, -0.25, 0, 0, 0, 0])


def test_an_attempt_with_too_few_rewards_of_segments_is_refused(group: Group) -> None:
    member = rewarded(group, (0.5,), (), (), ()).trajectories[0]
    with pytest.raises(ValueError, match="1 rewards of segments, wanted none or 3"):
        Trajectory.model_validate(dict(member))


def test_summaries_are_trained_like_any_other_token(group: Group, renderer: Renderer) -> None:
    first, second, last = make_samples(group, PLAIN)[:3]
    for sample in (first, second):
        segment = sample.segment
        sampled = renderer.decode(segment.token_ids_T[segment.loss_mask_T].tolist())
        assert sampled.endswith(f"{READ}<|end|>{SUMMARY}<|end|>")
    shown = renderer.decode(second.segment.token_ids_T[~second.segment.loss_mask_T].tolist())
    assert shown.startswith(f"<|user|>Fix a.py\n\n{SUMMARY}<|end|>")
    assert last.segment.sampled_tokens > 0


def test_segments_make_up_all_the_transcript_generated(group: Group) -> None:
    for trajectory in group.trajectories:
        transcript = trajectory.transcript
        copy = Transcript.from_bytes(transcript.to_bytes())
        assert len(copy.segments) == len(transcript.segments)
        assert sum(segment.sampled_tokens for segment in copy.segments) == sum(
            turn.generated_tokens for turn in copy.turns
        )


def test_the_penalty_for_divergence_is_one_for_the_chain(group: Group) -> None:
    samples = make_samples(group, PLAIN)
    penalty = penalize_divergence(
        samples, [0.3, 0.0, 0.1, 0.2, 0.0, 0.4, 0.0], ObjectiveConfig(kl_coefficient=0.1)
    )
    assert len(set(penalty.advantages[:3])) == 1
    assert sum(penalty.advantages[index] for index in (0, 3, 4, 6)) == pytest.approx(0.0)


def test_each_segment_gets_its_row_with_its_advantage(group: Group) -> None:
    samples = make_samples(group, PLAIN)
    advantages = [sample.advantage for sample in samples]
    batches = pack(samples, advantages, PackingConfig())
    rows = [
        (int(index), float(advantage))
        for batch in batches
        for index, advantage in zip(batch.sample_indices_B, batch.advantages_B, strict=True)
    ]
    assert sorted(rows) == list(enumerate(advantages))
    assert sum(int(batch.loss_mask_BT.sum()) for batch in batches) == sum(
        sample.segment.sampled_tokens for sample in samples
    )


def test_divided_by_length_every_attempt_weighs_as_much_as_its_reward(group: Group) -> None:
    """The sum over its tokens is the plain advantage times one constant."""
    divided = make_samples(group, ObjectiveConfig(divide_by_length=True))
    total: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    for sample in divided:
        total[sample.trajectory_id] += sample.advantage * sample.segment.sampled_tokens
        tokens[sample.trajectory_id] += sample.segment.sampled_tokens
    mean = sum(tokens.values()) / len(tokens)
    plain = {sample.trajectory_id: sample.advantage for sample in make_samples(group, PLAIN)}
    assert total == pytest.approx({name: mean * value for name, value in plain.items()})
    assert len(set(tokens.values())) > 1


def test_divided_by_deviation_the_spread_of_a_group_is_one(group: Group) -> None:
    scaled = make_samples(group, ObjectiveConfig(divide_by_deviation=True))
    by_trajectory = {sample.trajectory_id: sample.advantage for sample in scaled}
    assert pstdev(by_trajectory.values()) == pytest.approx(1.0)
    same = [
        member.model_copy(update={"reward": RewardReport(total=0.5, terms={"solved": 0.5})})
        for member in group.trajectories
    ]
    alike = group.model_copy(update={"trajectories": tuple(same)})
    scaled = make_samples(alike, ObjectiveConfig(divide_by_deviation=True))
    assert {sample.advantage for sample in scaled} == {0.0}


@pytest.mark.parametrize("division", ["divide_by_deviation", "divide_by_length"])
def test_a_penalty_is_divided_like_the_reward_that_it_comes_off(
    group: Group, renderer: Renderer, division: str
) -> None:
    """Also in a group with an attempt that ended before its first answer: its sample has no loss and its reward
    counts.
    """
    objective = ObjectiveConfig.model_validate({"kl_coefficient": 0.1, division: True})
    late = {"trajectory_id": "late", "transcript": transcript_of(renderer, [TimeoutError()])}
    members = (*group.trajectories, group.trajectories[0].model_copy(update=late))
    k1_nats = {"t0": 0.4, "t1": 0.2, "t2": 0.3}
    samples = make_samples(group.model_copy(update={"trajectories": members}), objective)
    assert not samples[-1].segment.sampled_tokens
    told = [
        k1_nats.get(sample.trajectory_id, 0.0) if sample.sample_id.endswith("/0") else 0.0
        for sample in samples
    ]
    poorer = []
    for member in members:
        total = member.reward.total - 0.1 * k1_nats.get(member.trajectory_id, 0.0)
        reward = RewardReport(total=total, terms={"solved": total})
        poorer.append(member.model_copy(update={"reward": reward}))
    wanted = make_samples(group.model_copy(update={"trajectories": tuple(poorer)}), objective)
    penalty = penalize_divergence(samples, told, objective)
    assert penalty.advantages == [sample.advantage for sample in wanted]
