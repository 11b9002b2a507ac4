"""A changed loss, corpus weight or grading rule builds again what depends on it, and nothing else."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ostinato

COMMAND = "from ostinato.flows.cli import main; main()"
AFTER_RL = {"reinforced", "scorecard", "candidate", "cycle", "traffic"}


@contextmanager
def changed(path: Path, old: str, new: str) -> Iterator[None]:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times, wanted once"
    path.write_text(text.replace(old, new))
    yield
    path.write_text(text)


class Project:
    """A copy of the source tree whose command runs in a home of its own."""

    def __init__(self, root: Path) -> None:
        self.package = root / "ostinato"
        self.home = root / "home"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(ostinato.__file__).parent, self.package, ignore=ignored)

    def built_by_demo(self, *options: str) -> Counter[str]:
        """Kinds of what a run of the miniature chain built, counted by run directories."""
        before = self._run_directories()
        done = subprocess.run(
            [sys.executable, "-P", "-c", COMMAND, "demo", "--recipe", "miniature", *options],
            env={
                **os.environ,
                "PYTHONPATH": str(self.package.parent),
                "OSTINATO_HOME": str(self.home),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return Counter(name.split("-")[0] for name in self._run_directories() - before)

    def _run_directories(self) -> set[str]:
        return {path.name for path in self.home.glob("runs/*/*")}


@pytest.mark.slow
@pytest.mark.timeout(1_500)
def test_a_changed_loss_builds_again_what_follows_from_rl(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.built_by_demo()

    with changed(project.package / "tasks/learning/objective.py", "total=-(", "total=+("):
        assert set(project.built_by_demo()) == AFTER_RL

    assert not project.built_by_demo(), "what was made before the code changed is known"


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_a_changed_grading_rule_or_corpus_weight_builds_again_what_follows(tmp_path: Path) -> None:
    project = Project(tmp_path)
    everything = project.built_by_demo()

    with changed(project.package / "tasks/grading/rewards.py", "-config.no_edit", "config.no_edit"):
        after_grading = project.built_by_demo()
    assert set(after_grading) == AFTER_RL
    assert after_grading["scorecard"] >= everything["scorecard"], "those before RL too"

    after_corpus = project.built_by_demo("--set", "corpus.budgets.library=13000")
    assert set(after_corpus) == set(everything) - {"problems"}
