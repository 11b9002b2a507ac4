"""Stages: what a change of code builds again, what is kept, forced, resumed."""

import logging
from pathlib import Path

import pytest

from ostinato.flows.operating.status.report import collect
from ostinato.flows.recipe import Recipe, load_recipe
from ostinato.flows.recipe_differences import RECIPE_FILE
from ostinato.flows.stages import stage
from ostinato.flows.stages.declared import STAGES, START_FILE, StageStart
from ostinato.flows.stages.forms import RunOptions
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef, Artifacts
from ostinato.infra.platform.code_identity import SourceTree, changed_files, installed_tree
from ostinato.infra.platform.errors import ConfigError
from ostinato.infra.platform.ledger import Ledger
from ostinato.infra.platform.objects import ObjectStore
from ostinato.infra.platform.settings import Settings
from tests.fakes.project_copy import copy_package


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree") / "ostinato"
    copy_package(root)
    return root


def stages_with_changed_code(root: Path, name: str, old: str, new: str) -> set[str]:
    """Names of the stages whose own code a replaced text changes; the text is put back."""
    path = root / name
    text = path.read_text()
    assert old in text, f"{name} holds no {old!r}"
    cache = root.with_name("cache.json")
    tree = SourceTree(root, cache=cache)
    before = {stage.name: tree.code_of(stage.entries) for stage in STAGES.values()}
    path.write_text(text.replace(old, new, 1))
    try:
        tree = SourceTree(root, cache=cache)
        after = {stage.name: tree.code_of(stage.entries) for stage in STAGES.values()}
    finally:
        path.write_text(text)
    return {name for name in before if changed_files(before[name], after[name])}


@pytest.mark.parametrize(
    ("name", "old", "new", "changed", "untouched"),
    [
        (
            "tasks/reinforcement/learning/objective.py",
            "total=-(",
            "total=+(",
            {"reinforcement", "candidate", "cycle"},
            {"problems", "corpus", "pretraining", "mtp", "speculation", "evaluation"},
        ),
        (
            "tasks/problems/breaking/drawn_mutations.py",
            "2.6",
            "99.0",
            {"corpus"},
            {"problems", "pretraining", "mtp", "reinforcement", "evaluation", "cycle"},
        ),
        (
            "tasks/grading/rewards.py",
            '"""',
            'RULE = 2\n"""',
            {"reinforcement", "evaluation", "cycle"},
            {"problems", "corpus", "pretraining", "mtp", "speculation", "candidate"},
        ),
        (
            "models/training/optimizer.py",
            "UPDATE_SCALE = 0.2",
            "UPDATE_SCALE = 0.3",
            {"pretraining", "mtp", "reinforcement"},
            {"problems", "corpus", "evaluation"},
        ),
    ],
)
@pytest.mark.sampled(2)
def test_changed_code_changes_the_stages_that_run_it_and_no_other(
    copied_tree: Path, name: str, old: str, new: str, changed: set[str], untouched: set[str]
) -> None:
    found = stages_with_changed_code(copied_tree, name, old, new)

    assert changed <= found
    assert not untouched & found


def test_comments_and_docstrings_change_no_stage(copied_tree: Path) -> None:
    name = "tasks/reinforcement/learning/objective.py"
    text = (copied_tree / name).read_text()
    prose = text.splitlines()[0]

    assert stages_with_changed_code(copied_tree, name, prose, f"{prose}  # prose") == set()


class Home:
    """Stages over a home of their own, with code as told."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = Settings(home=directory)
        objects = ObjectStore.from_url(f"file://{directory}/objects")
        self.ledger = Ledger(f"sqlite:///{directory}/ledger.db").migrate()
        self.artifacts = Artifacts(objects, self.ledger)
        self.code = {name: {f"{name}.py": "1"} for name in STAGES}
        self.built: list[str] = []
        monkeypatch.setattr(stage, "installed_tree", lambda _: self)

    def code_of(self, entries: tuple[str, ...], plugins: frozenset[str]) -> dict[str, str]:
        (name, *_) = [item.name for item in STAGES.values() if item.entries == entries]
        return self.code[name]

    def run(self, dies_in: str = "", **options: tuple[str, ...]) -> list[str]:
        """Names of the stages that were built by one command."""
        self.built = []
        context = StageContext(
            load_recipe("miniature"),
            self.settings,
            self.artifacts._objects,
            self.ledger,
            self.artifacts,
            RunOptions(**options),
        )
        parents: tuple[ArtifactRef, ...] = ()
        for name in ("problems", "corpus", "pretraining"):

            def build(directory: Path, name: str = name) -> tuple[Path, dict]:
                if name == dies_in:
                    raise KeyboardInterrupt
                self.built.append(name)
                (directory / "out").mkdir(exist_ok=True)
                (directory / "out" / "file").write_text(f"{name} {len(self.built)}")
                return directory / "out", {}

            parents = (context.ensure(name, {"size": 1}, parents, build),)
        self.last = parents[0]
        return self.built


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


def test_status_shows_what_was_published_as_finished(home: Home) -> None:
    home.run()
    home.code["pretraining"] = {"pretraining.py": "2"}
    with pytest.raises(KeyboardInterrupt):
        home.run(dies_in="pretraining")
    (run,) = (f"{path.name} " for path in (home.settings.home / "runs").iterdir())
    stages = [row for row in collect(home.settings) if row.part.startswith(run)]
    states = sorted((row.part.removeprefix(run).partition("-")[0], row.state) for row in stages)
    assert states == [
        ("corpus", "finished"),
        ("pretrained", "finished"),
        ("pretrained", "not started"),  # its child never began
        ("problems", "finished"),
    ]


def test_a_run_folder_names_its_newest_flow_run_and_keeps_its_recipe(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        home.run(dies_in="problems")
    [path] = (home.settings.home / "runs").glob(f"*/problems-*/{START_FILE}")
    assert StageStart.model_validate_json(path.read_bytes()).flow_run_id is None
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "0a1b")  # as in the process of a run
    home.run()
    assert StageStart.model_validate_json(path.read_bytes()).flow_run_id == "0a1b"
    kept = (path.with_name(RECIPE_FILE)).read_bytes()
    assert Recipe.model_validate_json(kept) == load_recipe("miniature")


def test_changed_code_rebuilds_from_its_stage_on_and_names_the_file(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    assert home.run() == ["problems", "corpus", "pretraining"]
    assert home.run() == []
    home.code["corpus"] = {"corpus.py": "2"}
    with caplog.at_level(logging.WARNING):
        assert home.run() == ["corpus", "pretraining"]
    assert (
        "stage corpus is built again (changed since corpus/miniature@1: corpus.py)" in caplog.text
    )
    assert "--keep corpus" in caplog.text
    assert home.run() == []


def test_keep_uses_the_newest_artifact_whatever_code_made_it(home: Home) -> None:
    home.run()
    home.code["corpus"] = {"corpus.py": "2"}

    assert home.run(keep=("corpus",)) == []
    with pytest.raises(ConfigError, match=r"--keep problems: no artifact problems/miniature"):
        Home(home.settings.home / "new", pytest.MonkeyPatch()).run(keep=("problems",))


def test_rebuild_forces_a_stage_once_and_what_follows_from_it(home: Home) -> None:
    home.run()

    assert home.run(rebuild=("corpus",)) == ["corpus", "pretraining"]
    assert home.run() == []
    assert home.run(rebuild=("corpus",)) == ["corpus", "pretraining"]
    assert home.run() == []


def test_a_stage_under_way_survives_a_commit_and_lists_what_changed(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        home.run(dies_in="pretraining")
    (begun,) = (home.settings.home / "runs").glob("*/pretrained-*")
    home.code["pretraining"] = {"pretraining.py": "2"}

    assert home.run() == ["pretraining"]
    assert f"pretrained-{home.last.fingerprint}" == begun.name
    assert home.artifacts.manifest(home.last).changed_files == ("pretraining.py",)
    assert home.run() == []
    home.code["pretraining"] = {"pretraining.py": "3"}
    assert home.run() == ["pretraining"]
    assert home.artifacts.manifest(home.last).changed_files == ()


def test_rebuild_begins_a_stage_under_way_anew_when_its_code_changed(home: Home) -> None:
    with pytest.raises(KeyboardInterrupt):
        home.run(dies_in="pretraining")
    home.code["pretraining"] = {"pretraining.py": "2"}
    home.run(rebuild=("pretraining",))

    assert home.artifacts.manifest(home.last).changed_files == ()


def test_options_name_the_stages_there_are() -> None:
    with pytest.raises(
        ValueError, match="no stage 'pretrain', wanted one of problems, environments"
    ):
        RunOptions(keep=("pretrain",))


def test_every_stage_of_the_project_has_code() -> None:
    tree = installed_tree()

    assert all(len(tree.code_of(stage.entries)) > 5 for stage in STAGES.values())
