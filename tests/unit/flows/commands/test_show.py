"""`ostinato show`: lineage back to source archives, and attempts as they were stored."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.reporting.attempts import find_examples
from ostinato.flows.stages import chain
from ostinato.flows.stages.lineage import SOURCES
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.agent.transcript import CallStatus, ToolCallRecord, TurnRecord
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger.rows import FeedbackRow
from ostinato.models.rendering.renderer import TOKENIZER_FILE
from ostinato.tasks.evaluation.attempts import TRAJECTORIES_FILE, plan_attempts
from ostinato.tasks.problems.published import PROBLEMS_FILE
from ostinato.tasks.records import Group, Problem, Trajectory
from ostinato.tasks.rollout.journal import RolloutJournal
from ostinato.tasks.rollout.records import AttemptRequest
from tests.fakes.finished_stages import add_checkpoint, open_context
from tests.fakes.interactions import new_interaction
from tests.fakes.rollouts import make_problem, make_trajectory

RUN = "reinforced-abc"
ARCHIVE = "pkg==1.2 sha256:00ff"
PATCH = "--- a/pkg/code.py\n+++ b/pkg/code.py\n@@ -2 +2 @@\n-    return 2\n+    return 1"
TURN = TurnRecord(
    generated_tokens=4,
    text="I read it.",
    calls=(
        ToolCallRecord(
            tool="read_file", arguments={"path": "code.py"}, status=CallStatus.OK, wall_seconds=0.1
        ),
    ),
    results=("def one():",),
)


def show(*arguments: str) -> str:
    answer = CliRunner().invoke(app, ["show", *arguments], catch_exceptions=False)
    assert answer.exit_code == 0
    return answer.stdout


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    return open_context(tmp_path, "mine")


def add_problem_set(context: StageContext, problem: Problem) -> ArtifactRef:
    def build(directory: Path) -> tuple[Path, dict]:
        text = problem.model_dump_json()
        return chain.one_file(directory, PROBLEMS_FILE, text), {SOURCES: [ARCHIVE]}

    return context.ensure("problems", {"set": "a"}, (), build)


def worked_on(request: AttemptRequest) -> Trajectory:
    plain = make_trajectory(request, solved=request.attempt == 0)
    transcript = plain.transcript.model_copy(update={"turns": (TURN, *plain.transcript.turns)})
    return plain.model_copy(
        update={"transcript": transcript, "changed_files": {"pkg/code.py": PATCH}}
    )


def test_lineage_goes_back_to_source_archives_and_says_whom_it_served(
    context: StageContext,
) -> None:
    problems = add_problem_set(context, make_problem("p"))
    first = add_checkpoint(context, problems, "first")
    second = add_checkpoint(context, first, "second")
    context.ledger.promotions.promote("mine", str(second), None, "better", 1.0)
    lines = show(str(second)).splitlines()
    assert [line.split()[0] for line in lines if "|" not in line] == [
        str(second),
        str(first),
        str(problems),
    ]
    assert any("promoted on line mine" in line and "better" in line for line in lines)
    assert lines[-1].endswith(f"| source {ARCHIVE}")
    found = json.loads(show(str(second), "--json"))
    assert found["parents"][0]["parents"][0]["sources"] == [ARCHIVE]


def test_run_group_and_trajectory_are_shown_as_they_were_stored(context: StageContext) -> None:
    problem = make_problem("p")
    add_problem_set(context, problem)
    journal = RolloutJournal(context.ledger.journal, context.objects, RUN)
    for number in range(2):
        name = f"{RUN}.g{number:06d}"
        requests = [
            AttemptRequest(f"{name}.t{index}", name, problem, index, retry=0, seed=index)
            for index in range(2)
        ]
        journal.reserve(requests, weight_version=3)
        attempts = tuple(worked_on(request) for request in requests)
        journal.commit(Group(group_id=name, problem_id="p", trajectories=attempts))
    journal.mark_trained([f"{RUN}.g000001"], step=7)
    assert len(show(RUN).splitlines()) == 4
    group = show(f"{RUN}.g000001").splitlines()
    assert group == [
        f"{RUN}.g000001.t0  finished, reward +1.000, trained",
        f"{RUN}.g000001.t1  finished, reward +0.000, trained",
    ]
    text = show(f"{RUN}.g000001.t0")
    for part in (problem.prompt, "read_file", "def one():", PATCH, "1 of 1 tests", "solved +1.000"):
        assert part in text
    assert "trained at step 7, weight version 3" in text
    [attempt] = json.loads(show(f"{RUN}.g000001.t0", "--json"))
    assert (attempt["journal"]["trained_step"], attempt["reward"]["total"]) == (7, 1.0)


def test_examples_are_of_the_last_step_and_differ_in_reward(context: StageContext) -> None:
    assert find_examples(context.settings, RUN) == {}
    journal = RolloutJournal(context.ledger.journal, context.objects, RUN)
    for number in range(2):
        name = f"{RUN}.g{number:06d}"
        requests = [
            AttemptRequest(f"{name}.t{index}", name, make_problem("p"), index, retry=0, seed=index)
            for index in range(3)
        ]
        journal.reserve(requests, weight_version=3)
        attempts = tuple(worked_on(request) for request in requests)
        journal.commit(Group(group_id=name, problem_id="p", trajectories=attempts))
        journal.mark_trained([name], step=number + 1)
    examples = find_examples(context.settings, RUN)
    assert [*examples] == [f"{rank} reward of step 2" for rank in ("best", "median", "worst")]
    rewards = [attempt.facts["reward"]["total"] for attempt in examples.values()]
    assert rewards == [1.0, 0.0, 0.0]
    assert {attempt.facts["group_id"] for attempt in examples.values()} == {f"{RUN}.g000001"}


def test_attempt_without_a_payload_says_what_the_journal_knows(context: StageContext) -> None:
    request = AttemptRequest(f"{RUN}.g000000.t0", f"{RUN}.g000000", make_problem("p"), 0, 0, 0)
    journal = RolloutJournal(context.ledger.journal, context.objects, RUN)
    journal.reserve([request], weight_version=0)
    text = show(request.trajectory_id)
    assert "journal: reserved" in text
    assert "no more of it was stored" in text


def test_attempt_of_an_evaluation_is_found_in_the_newest_that_has_it(context: StageContext) -> None:
    problem = make_problem("p")
    problems = add_problem_set(context, problem)
    for number in range(2):
        [request] = plan_attempts([problem], attempts_per_problem=1, seed=number)
        kept = worked_on(request).model_dump(mode="json", exclude={"transcript": {"segments"}})

        def build(directory: Path, text: str = json.dumps(kept)) -> tuple[Path, dict]:
            return chain.one_file(directory, TRAJECTORIES_FILE, text), {}

        context.ensure("evaluation", {"number": number}, (problems,), build)
    text = show("evaluation.p.t0")
    assert "evaluation: scorecard/mine@2" in text
    assert problem.prompt in text


def talk(context: StageContext, checkpoint: str, name: str = "interaction-1") -> None:
    """What a user of one serving line asked for and said about the answer."""
    request = AttemptRequest("t", "g", make_problem("p"), 0, 0, 0)
    key = f"interactions/{name}/transcript.safetensors"
    context.objects.put_bytes(key, worked_on(request).transcript.to_bytes())
    context.ledger.interactions.record(
        new_interaction(name, "mine", checkpoint).model_copy(
            update={
                "tenant": "shop",
                "session_id": "session-1",
                "weight_version": 5,
                "object_key": key,
            }
        )
    )
    context.ledger.interactions.add_feedback(
        FeedbackRow(
            feedback_id=f"{name}/thumbs_down",
            interaction_id=name,
            signal="thumbs_down",
            value=1.0,
            created_at=2.0,
        )
    )


def test_users_turn_is_shown_with_what_the_model_read_and_users_said(context: StageContext) -> None:
    texts = Tokenizer(
        WordLevel({f"word{index} ": index for index in range(20)}, unk_token="word0 ")
    )

    def build(directory: Path) -> tuple[Path, dict]:
        return chain.one_file(directory, TOKENIZER_FILE, texts.to_str()), {}

    served = context.ensure(
        "reinforcement", {}, (add_problem_set(context, make_problem("p")),), build
    )
    talk(context, str(served))
    text = show("interaction-1")
    for part in (
        "word7 word8 word9",
        "read_file",
        "thumbs_down 1",
        f"answered by: {served}",
        "shop",
    ):
        assert part in text
    earned = re.search(r"reward in a cycle: (\S+) with the default weights: (.*)", text)
    assert earned is not None
    assert "thumbs_down -0.25" in earned[2]
    terms = [float(term.rpartition(" ")[2]) for term in earned[2].split(", ")]
    assert float(earned[1]) == pytest.approx(max(-1, min(1, sum(terms))))
    talk(context, "lost/mine@1", "interaction-2")
    assert "tokenizer is not in this ledger" in show("interaction-2")
    assert [line.split()[0] for line in show("session-1").splitlines()] == [
        "interaction-1",
        "interaction-2",
    ]


@pytest.mark.parametrize("name", ["nothing", "evaluation.p.t0", "reinforced/mine@1"])
def test_what_does_not_exist_is_refused(context: StageContext, name: str) -> None:
    with pytest.raises(ConfigError, match="wanted"):
        show(name)
