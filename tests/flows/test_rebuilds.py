"""Changed code or settings build again what depends on them and nothing else, on one finished chain. (By day, which
stages a change of code touches: tests/unit/flows/stages/test_stage.)
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ostinato.flows.controls import FINE_TUNING
from ostinato.flows.stages import chain
from ostinato.flows.stages.stage import StageContext
from ostinato.tasks.evaluation.controls import ControlReport
from ostinato.tasks.pretraining.config import PretrainingResult
from tests.fakes.project_copy import ProjectCopy, times_of_results

AFTER_RL = {"reinforced", "scorecard", "candidate", "cycle", "traffic"}
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1_800)]


class Built(NamedTuple):
    """A copy of the project, the home of its command, and the kinds that the whole chain built."""

    project: ProjectCopy
    home: Path
    kinds: Counter[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSTINATO_HOME", str(home))
        project = ProjectCopy(tmp_path_factory.mktemp("project"), home)
        yield Built(project, home, project.built_by_demo())


def test_a_changed_loss_builds_again_what_follows_from_rl(built: Built) -> None:
    finished = times_of_results(built.home)
    with built.project.changed("tasks/reinforcement/learning/objective.py", "total=-(", "total=+("):
        assert set(built.project.built_by_demo()) == AFTER_RL
    both = times_of_results(built.home)
    assert both.items() > finished.items()

    assert not built.project.built_by_demo()
    assert times_of_results(built.home) == both


def test_controls_stand_beside_rl(built: Built) -> None:
    """The start, that start fine-tuned further, and what the start does with more attempts."""
    built.project.run("run", "controls", "--recipe", "miniature")
    context = StageContext.open("miniature")
    [row] = context.ledger.artifacts.list("controls")
    table = context.artifacts.get(f"controls/{row.name}@{row.version}")
    report = chain.result_of(context, table, ControlReport)
    names = [control.name for control in report.controls]
    assert names[:2] == ["start", FINE_TUNING]
    assert len(names) == 4
    tuned = context.artifacts.get("pretrained/miniature-further@1")
    [phase] = chain.result_of(context, tuned, PretrainingResult).phases
    assert phase.tokens == context.recipe.controls.fine_tuning_tokens


def test_a_changed_grading_rule_or_corpus_weight_builds_again_what_follows(built: Built) -> None:
    with built.project.changed("tasks/grading/rewards.py", "-config.no_edit", "config.no_edit"):
        after_grading = built.project.built_by_demo()
    assert set(after_grading) == AFTER_RL
    assert after_grading["scorecard"] >= built.kinds["scorecard"], "those before RL too"

    after_corpus = built.project.built_by_demo("--set", "corpus.budgets.library=13000")
    assert set(after_corpus) == set(built.kinds) - {"problems"}
