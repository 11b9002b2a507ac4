"""A changed grading rule or corpus weight builds again what depends on it and nothing else. (A changed loss:
test_agent_training.)
"""

from pathlib import Path

import pytest

from tests.fakes.project_copy import ProjectCopy
from tests.flows.test_agent_training import AFTER_RL


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_a_changed_grading_rule_or_corpus_weight_builds_again_what_follows(
    tmp_path_factory: pytest.TempPathFactory, home: Path
) -> None:
    project = ProjectCopy(tmp_path_factory.mktemp("project"), home)
    everything = project.built_by_demo()

    with project.changed("tasks/grading/rewards.py", "-config.no_edit", "config.no_edit"):
        after_grading = project.built_by_demo()
    assert set(after_grading) == AFTER_RL
    assert after_grading["scorecard"] >= everything["scorecard"], "those before RL too"

    after_corpus = project.built_by_demo("--set", "corpus.budgets.library=13000")
    assert set(after_corpus) == set(everything) - {"problems"}
