"""The packages of examples/ installed beside the project: each does its work by its name alone."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ostinato.flows.recipe import load_recipe
from ostinato.infra.agent.config import AgentRequest, HarnessConfig
from ostinato.infra.agent.environment import AgentEnvironment
from ostinato.infra.agent.loop.attempt import run_agent
from ostinato.infra.agent.transcript import Transcript
from ostinato.infra.platform import plugins
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.code_identity import installed_tree
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.settings import Settings
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.infra.serving.engine.replica import EngineReplica
from ostinato.infra.serving.engine.start import load_engine
from ostinato.infra.serving.weights.publisher import ChainPublisher
from ostinato.models.checkpoint import load_checkpoint, save_checkpoint
from ostinato.models.decode.config import DecodingConfig, configure_engine
from ostinato.models.decode.protocol import GenerateRequest
from ostinato.models.network.build import build_trainer_model
from ostinato.models.rendering import Renderer, train_tokenizer
from ostinato.tasks.conversion.own_stage import main as run_stage
from ostinato.tasks.conversion.pipeline import OwnStageRequest
from ostinato.tasks.grading.config import GradingConfig
from ostinato.tasks.grading.environments import EnvironmentConfig
from ostinato.tasks.grading.grade import make_grader
from ostinato.tasks.problems.config import EnvironmentsRequest
from ostinato.tasks.problems.environments.run import main
from ostinato.tasks.records import Problem, Split, Trajectory
from ostinato.tasks.reinforcement.learning.config import (
    LearningConfig,
    ObjectiveConfig,
    TrainerRequest,
)
from ostinato.tasks.reinforcement.learning.trainer import RLTrainer
from ostinato.tasks.rollout.attempts import AttemptPool
from ostinato.tasks.rollout.config import CurriculumConfig, RolloutConfig
from ostinato.tasks.rollout.curriculum import Curriculum
from ostinato.tasks.rollout.records import AttemptRequest
from ostinato.tasks.rollout.sandboxes import Sandboxes
from ostinato.tasks.rollout.worker import RolloutWorker
from tests.benchmarks.orchestrator import Load, Observed, Simulation
from tests.fakes.answering_model import AnsweringModel
from tests.fakes.memory_sandbox import MemorySandbox
from tests.fakes.rollouts import make_problem
from tests.fakes.tiny_model import TINY, random_weights
from tests.unit.tasks.reinforcement.learning.samples import TINY as EXPERTS
from tests.unit.tasks.reinforcement.learning.samples import random_samples

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = (
    "environment",
    "tool",
    "reward",
    "dialect",
    "admission",
    "curriculum",
    "sampler",
    "engine",
    "objective",
    "stage",
)
SOURCE = "class Box:\n    def size(self):\n        return 1\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples as pip installs them, without network."""
    target = tmp_path_factory.mktemp("site")
    sources = tmp_path_factory.mktemp("sources")  # a build leaves files beside its source
    subprocess.run(["cp", "-r", *(EXAMPLES / name for name in PACKAGES), sources], check=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-build-isolation", "--target", str(target)]
    subprocess.run([*command, *options, *(sources / name for name in PACKAGES)], check=True)
    return target


@pytest.fixture
def installed(target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(target)
    plugins.installed_entries.cache_clear()
    yield
    plugins.installed_entries.cache_clear()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(train_tokenizer([SOURCE, "apples,12\nanswer.txt"], vocab_size=400))


def make_recipe(directory: Path, text: str) -> str:
    path = directory / "mine.toml"
    path.write_text(f'extends = "miniature"\nname = "mine"\n{text}')
    return str(path)


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("[environments.chess]\ntrain = 1\n", "ostinato.environments"),
        ("[grading.rewards]\nchess = 1.0\n", "ostinato.rewards"),
        ('[harness]\ndialect = "chess"\n', "ostinato.dialects"),
        ('[harness]\ndialect = "full"\ntools = ["chess"]\n', "ostinato.tools"),
        ('[rollout.staleness]\nadmission = "chess"\n', "ostinato.admissions"),
        ('[rollout.curriculum]\nweight = "chess"\n', "ostinato.curricula"),
        ('[rollout]\nsampler = "chess"\n', "ostinato.samplers"),
        ('[decoding]\nengine = "chess"\n', "ostinato.engines"),
        (
            '[pipeline]\nstages = ["pretraining", "mtp", "chess", "reinforcement"]\n',
            "ostinato.stages",
        ),
        ('[learning.objective]\nadvantages = "chess"\n', "ostinato.advantages"),
        ('[learning.objective]\nloss = "chess"\n', "ostinato.losses"),
        ('[harness]\ntools = ["outline"]\n', "compact dialect, whose tool names are token ids"),
    ],
)
def test_a_recipe_with_a_name_that_nothing_provides_is_refused(
    tmp_path: Path, text: str, group: str
) -> None:
    with pytest.raises(ConfigError, match=group):
        load_recipe(make_recipe(tmp_path, text))


@pytest.mark.usefixtures("installed")
def test_a_recipe_names_all_of_them_and_the_error_lists_them(tmp_path: Path) -> None:
    text = (
        "[environments.tallies]\ntrain = 3\n[grading.rewards]\nbrevity = -0.01\n"
        '[harness]\ndialect = "json"\ntools = ["read_file", "outline"]\n'
        '[rollout.staleness]\nadmission = "one_step_ahead"\n'
        '[rollout]\nsampler = "ladder"\n[rollout.curriculum]\nweight = "small_first"\n[decoding]\nengine = "timed"\n'
        '[learning.objective]\nadvantages = "leave_one_out"\nloss = "clipped_surrogate"\n'
    )
    recipe = load_recipe(make_recipe(tmp_path, text))
    assert recipe.environments == {"tallies": EnvironmentConfig(train=3)}
    forked = '[rollout]\nsampler = "ladder"\nforked_share = 0.5\n'
    with pytest.raises(ConfigError, match="wanted 'constant' or forked_share=0"):
        load_recipe(make_recipe(tmp_path, forked))
    with pytest.raises(ConfigError, match="wanted one of verifiers, tallies"):
        load_recipe(make_recipe(tmp_path, "[environments.tallys]\n"))


def run_attempt(
    renderer: Renderer, config: HarnessConfig, answers: list[str]
) -> tuple[Transcript, AnsweringModel]:
    model = AnsweringModel(renderer, lambda text: answers[text.count("<|assistant|>")])
    environment = AgentEnvironment(MemorySandbox({"a.py": SOURCE.encode()}))
    request = AgentRequest(prompt="What is in a.py?", session_id="s")
    return asyncio.run(run_agent(model, renderer, environment, request, config)), model


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("dialect", "call"),
    [
        ("full", '<call tool="outline">\n<path>a.py</path>\n</call>'),
        ("json", json.dumps({"tool": "outline", "arguments": {"path": "a.py"}})),
    ],
)
def test_the_tool_answers_in_every_plain_text_dialect(
    renderer: Renderer, dialect: str, call: str
) -> None:
    config = HarnessConfig(dialect=dialect, tools=("read_file", "outline"), context_tokens=20_000)
    transcript, model = run_attempt(renderer, config, [call, "A class."])

    assert "1: class Box:\n2:     def size(self):" in transcript.turns[0].results[0]
    assert transcript.final_message == "A class."
    prompt = renderer.decode(list(model.requests[0].token_ids))
    assert "## outline\nList the classes and functions of a Python file." in prompt
    assert call.split("outline")[0] in prompt  # the guide shows how a call begins


@pytest.mark.usefixtures("installed")
def test_the_dialect_makes_a_result_of_a_broken_call(renderer: Renderer) -> None:
    config = HarnessConfig(dialect="json", context_tokens=20_000)
    transcript, _ = run_attempt(renderer, config, ['{"tool": ', "I give up."])
    assert "no call in JSON" in transcript.turns[0].results[0]


def draw(directory: Path, seed: int) -> list[Problem]:
    """The problems of the stage over an empty problem set."""
    (directory / "base" / "repositories").mkdir(parents=True, exist_ok=True)
    (directory / "base" / "problems.jsonl").write_text("")
    request = EnvironmentsRequest(
        problems_directory=str(directory / "base"),
        environments={"tallies": EnvironmentConfig(train=6, held_out=2)},
        seed=seed,
    )
    result = main(request, Workspace.open(directory, Settings(home=directory)))
    lines = (Path(result.directory) / "problems.jsonl").read_text().splitlines()
    return [Problem.model_validate_json(line) for line in lines]


@pytest.mark.usefixtures("installed")
def test_problems_of_an_environment_are_distinct_and_drawn_by_the_seed(tmp_path: Path) -> None:
    problems = draw(tmp_path, seed=1)
    assert [problem.split for problem in problems] == [Split.TRAIN] * 6 + [Split.HELD_OUT] * 2
    assert len({problem.given_files["sales.csv"] for problem in problems}) == 8
    assert draw(tmp_path, seed=1) == problems != draw(tmp_path, seed=2)


async def roll_out(
    renderer: Renderer,
    repository: PreparedRepository,
    problem: Problem,
    answer: Callable[[str], str],
) -> Trajectory:
    worker = RolloutWorker(
        converse=partial(run_agent, AnsweringModel(renderer, answer), renderer),
        harness=HarnessConfig(),
        sandboxes=Sandboxes([repository], concurrent_trajectories=1),
        grade=make_grader(GradingConfig(rewards={"brevity": -0.01})),
        clock=time.monotonic,
    )
    try:
        return await worker.attempt(AttemptRequest("g.t0", "g", problem, 0, 0, 1))
    finally:
        await worker.close()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("is_right", [True, False])
def test_a_scripted_model_is_rolled_out_and_graded_by_the_environment(
    renderer: Renderer, tmp_path: Path, is_right: bool
) -> None:
    problem = draw(tmp_path, seed=1)[0]
    repository = PreparedRepository.load(tmp_path / "problems" / "repositories" / "tallies")
    total = problem.facts["total"] if is_right else "none"
    write = f"<write_file><path>answer.txt</path>{total}\n</write_file>"
    answers = ("<read_file>sales.csv</read_file>", write, "Done.")

    trajectory = asyncio.run(
        roll_out(renderer, repository, problem, lambda text: answers[text.count("<|assistant|>")])
    )
    assert (
        problem.given_files["sales.csv"].split(",")[0] in trajectory.transcript.turns[0].results[0]
    )
    assert trajectory.verdict is not None
    assert trajectory.verdict.passed is is_right
    assert trajectory.reward.terms["correctness"] == float(is_right)
    assert trajectory.reward.terms["brevity"] == (-0.01 if is_right else 0.0)
    assert set(trajectory.changed_files) == {"answer.txt"}


@pytest.mark.usefixtures("installed")
def test_small_problems_are_drawn_first() -> None:
    problems = [
        make_problem(f"p{lines:02}").model_copy(update={"last_line": lines})
        for lines in range(1, 31)
    ]
    config = CurriculumConfig(weight="small_first")
    curriculum = Curriculum(problems, config, group_size=8, seed=0)
    drawn = [curriculum.draw(()).last_line for _ in problems]
    assert sum(drawn[:10]) < sum(drawn[10:20]) < sum(drawn[20:])


@pytest.mark.usefixtures("installed")
def test_attempts_of_a_group_have_the_temperatures_of_the_sampler() -> None:
    pool = make_pool("ladder")
    found = [pool.request(make_problem("p"), "g", attempt).temperature for attempt in range(4)]
    assert found == pytest.approx([2 / 3, 7 / 9, 8 / 9, 1.0])
    assert pool.request(make_problem("p"), "g", 2, retry=1).temperature == found[2]


@pytest.mark.parametrize("given", [0.0, -1.0, 11.0, float("nan"), float("inf"), None, "hot"])
def test_a_temperature_at_which_nothing_can_be_sampled_ends_the_run(
    given: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool("constant")
    monkeypatch.setattr(pool, "_sampler", lambda *_: given)
    with pytest.raises(
        ConfigError, match="sampler 'constant' gives attempt 0 at problem p the temp"
    ):
        pool.request(make_problem("p"), "g", 0)


def make_pool(sampler: str) -> AttemptPool:
    async def attempt(_: AttemptRequest) -> Trajectory:
        raise AssertionError

    config = RolloutConfig(sampler=sampler, group_size=4)
    return AttemptPool("run", config, attempt, on_change=lambda: None)


@pytest.mark.parametrize("name", ["objective", "curriculum", "sampler", "stage"])
def test_a_door_for_researchers_takes_forty_lines(name: str) -> None:
    [module] = (EXAMPLES / name).glob("*.py")
    assert len(module.read_text().splitlines()) <= 40


@pytest.mark.usefixtures("installed")
def test_groups_start_as_the_admission_says_and_slow_ones_are_trained_as_quick_ones_are() -> None:
    load = Load(steps=15, slots=512, step_seconds=20.0)
    ahead, early = (
        Simulation(replace(load, admission=name), 4, seed=0).run()
        for name in ("one_step_ahead", "cap")
    )
    assert mean_age(ahead) < mean_age(early) - 0.5
    assert ahead.lost_trajectories == ahead.stale_groups == 0
    assert ahead.trained_seconds_mean == pytest.approx(ahead.sampled_seconds_mean, rel=0.1)


def mean_age(seen: Observed) -> float:
    return sum(age * count for age, count in seen.staleness_groups.items()) / sum(
        seen.staleness_groups.values()
    )


@pytest.mark.usefixtures("installed")
async def test_answers_come_from_the_engine_that_the_recipe_names(tmp_path: Path) -> None:
    recipe = load_recipe(make_recipe(tmp_path, '[decoding]\nengine = "timed"\n'))
    directory = save_checkpoint(tmp_path / "checkpoint", TINY, random_weights(TINY))
    request = GenerateRequest("a", "session", (1, 2, 3), 4, (), temperature=0.0)
    engine = load_engine(directory, "timed", recipe.decoding, slots=2)
    try:
        answer = await engine.generate(request)
        assert engine.statistics()["answer_seconds_max"] > 0
    finally:
        engine.close()
    config = configure_engine(recipe.decoding, slots=2)
    replica = EngineReplica("replica", TINY, config)  # the class of the actor
    objects = ObjectStore.from_url(f"file://{tmp_path}/objects")
    ChainPublisher(objects, "chain").publish(1, random_weights(TINY))
    await replica.follow(objects, "chain")
    assert (await replica.generate(request)).token_ids == answer.token_ids
    assert (await replica.statistics())["answer_seconds_max"] > 0
    own = load_engine(directory, "own", DecodingConfig(), slots=2)
    try:
        assert (await own.generate(request)).token_ids == answer.token_ids
    finally:
        own.close()


@pytest.mark.usefixtures("installed")
def test_the_code_of_an_engine_is_part_of_what_it_computes() -> None:
    code = installed_tree().code_of(["ostinato.infra.serving.engine.start"], {"timed"})
    assert "plug-in timed" in code


@pytest.mark.usefixtures("installed")
def test_a_step_with_the_own_objective_starts_as_the_shipped_one(tmp_path: Path) -> None:
    """At equal policies the clipped surrogate has the gradient of the policy gradient."""
    model = build_trainer_model(EXPERTS, seed=3)
    start = save_checkpoint(tmp_path / "start", EXPERTS, model.export_weights())
    samples = random_samples(model, 4, seed=1)
    reports = []
    for loss in ("policy_gradient", "clipped_surrogate"):
        objective = ObjectiveConfig(loss=loss, advantages="leave_one_out", loss_divisor_tokens=64)
        request = TrainerRequest(
            config=LearningConfig(objective=objective),
            checkpoint_directory=str(start),
            work_directory=str(tmp_path / loss),
            chain_id=loss,
        )
        trainer = RLTrainer(request, ObjectStore.from_url(f"file://{tmp_path}/{loss}-objects"))
        reports.append(trainer.step(samples))
        trainer.close()
    plain, own = reports
    assert own.loss != plain.loss
    assert own.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-4) != 0


@pytest.mark.usefixtures("installed")
def test_a_stage_changes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    kept = next(iter(weights))
    start = save_checkpoint(tmp_path / "start", TINY, weights, metadata={"stage": "mtp"})
    settings = {"except": [kept]}
    request = OwnStageRequest(
        stage_name="rounded",
        settings=settings,
        seed=0,
        checkpoint_directory=str(start),
        problems_directory="",
    )
    result = run_stage(request, Workspace.open(tmp_path, Settings(home=tmp_path)))

    after = load_checkpoint(Path(result.checkpoint_directory))
    assert (after.spec, after.metadata) == (TINY, {"stage": "mtp"})
    for name, weight in after.weights.items():
        wanted = weights[name] if name == kept else weights[name].bfloat16().float()
        assert torch.equal(weight, wanted)
    assert 0.5 < result.changed_ratio < 1
