"""The demo on an S3 server and Postgres: every artifact is there, and a changed loss, corpus weight or grading
rule builds again what depends on it and nothing else.
"""

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
from ostinato.flows.stages.stage import StageContext
from tests.fakes.storage import remote_storage

COMMAND = "from ostinato.flows.cli import main; main()"
AFTER_RL = {"reinforced", "scorecard", "candidate", "cycle", "traffic"}
AWS_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")


@pytest.fixture
def remote_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home whose objects and ledger are on servers."""
    with remote_storage(home.name) as told:
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        for name in AWS_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        yield home


@contextmanager
def changed(path: Path, old: str, new: str) -> Iterator[None]:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times, wanted once"
    path.write_text(text.replace(old, new))
    yield
    path.write_text(text)


class Project:
    """A copy of the source tree whose command runs in the home that the environment names."""

    def __init__(self, root: Path, home: Path) -> None:
        self.package = root / "ostinato"
        self.home = home
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
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return Counter(name.split("-")[0] for name in self._run_directories() - before)

    def _run_directories(self) -> set[str]:
        return {path.name for path in self.home.glob("runs/*/*")}


def test_stage_context_keeps_objects_on_the_server_that_the_settings_name(
    remote_home: Path,
) -> None:
    context = StageContext.open("miniature")
    context.objects.put_bytes("key", b"value")
    assert context.objects.list() == ["key"]
    assert context.ledger.promotions.history("tests") == []


@pytest.mark.slow
@pytest.mark.timeout(1_500)
def test_a_changed_loss_builds_again_what_follows_from_rl_and_servers_keep_all_of_it(
    tmp_path_factory: pytest.TempPathFactory, remote_home: Path
) -> None:
    project = Project(tmp_path_factory.mktemp("project"), remote_home)
    project.built_by_demo()

    context = StageContext.open("miniature")
    for kind in ("problems", "corpus", "pretrained", "drafted", "reinforced", "candidate"):
        [row] = context.ledger.artifacts.list(kind)
        assert context.objects.exists(f"{row.object_prefix}/artifact.json")
    assert any("chain" in key for key in context.objects.list())
    assert not (remote_home / "objects").exists()
    assert not (remote_home / "ledger.db").exists()

    with changed(project.package / "tasks/learning/objective.py", "total=-(", "total=+("):
        assert set(project.built_by_demo()) == AFTER_RL

    assert not project.built_by_demo(), "what was made before the code changed is known"


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_a_changed_grading_rule_or_corpus_weight_builds_again_what_follows(
    tmp_path_factory: pytest.TempPathFactory, home: Path
) -> None:
    project = Project(tmp_path_factory.mktemp("project"), home)
    everything = project.built_by_demo()

    with changed(project.package / "tasks/grading/rewards.py", "-config.no_edit", "config.no_edit"):
        after_grading = project.built_by_demo()
    assert set(after_grading) == AFTER_RL
    assert after_grading["scorecard"] >= everything["scorecard"], "those before RL too"

    after_corpus = project.built_by_demo("--set", "corpus.budgets.library=13000")
    assert set(after_corpus) == set(everything) - {"problems"}
