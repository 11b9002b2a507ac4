"""`ostinato gc --recipe`: what serves users stays and loads, older checkpoints leave the store, and a stage makes them again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.flows.cli import app
from ostinato.flows.commands.garbage import Retention
from ostinato.flows.stages import chain
from ostinato.flows.stages.realtime import roll_back
from ostinato.flows.stages.stage import StageContext
from ostinato.infra.platform.artifacts import ArtifactRef
from ostinato.infra.platform.cluster.processes import mark_process
from ostinato.infra.platform.cluster.workspace import PROCESS
from ostinato.infra.platform.errors import ConfigError, StorageError
from tests.fakes.finished_stages import add_checkpoint, add_problems, open_context

LINE = "tests"
TEXT = f'[serving]\nline = "{LINE}"\n[retention]\ncheckpoints_per_line = 2\ndays = 0.0\n'


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    """Candidates 1 to 4, each trained from the one before and promoted, then a refused one and a chain that was
    left.
    """
    monkeypatch.setenv("OSTINATO_HOME", str(tmp_path / "home"))
    context = open_context(tmp_path, "mine", TEXT)
    problems = add_problems(context, "a")
    add_checkpoint(context, problems, "left")
    parent = add_checkpoint(context, problems, "first")
    for number in range(4):
        parent = candidate(context, parent, number)
        context.ledger.promotions.promote(LINE, str(parent), None, "by the test", number)
    candidate(context, parent, 4)
    candidate(context, parent, 5)  # the newest stays
    time.sleep(0.01)  # all are older than no day at all
    return context


def candidate(context: StageContext, parent: ArtifactRef, number: int) -> ArtifactRef:
    def build(directory: Path) -> tuple[Path, dict]:
        return chain.one_file(directory, "weights", f"of {number}"), {}

    return context.ensure("candidate", {"cycle": number}, (parent,), build)


def recipe_of(context: StageContext) -> str:
    return str(context.settings.home.parent / "mine.toml")


def gc(context: StageContext, *arguments: str) -> str:
    given = ["gc", "--recipe", recipe_of(context), *arguments]
    answer = CliRunner().invoke(app, given, catch_exceptions=False)
    assert answer.exit_code == 0
    return answer.stdout


def stored(context: StageContext) -> set[str]:
    """Checkpoints in the store, each whole."""
    found = set()
    for kind in ("candidate", "reinforced"):
        for row in context.ledger.artifacts.list(kind):
            ref = context.artifacts.get(f"{row.kind}/{row.name}@{row.version}")
            if not context.artifacts.is_removed(ref):
                assert context.artifacts.find_damage(ref) == []
                found.add(str(ref))
    return found


def test_a_setting_of_one_run_keeps_more(context: StageContext) -> None:
    assert len(stored(context)) == 8
    gc(context, "--set", "retention.checkpoints_per_line=99", "--set", "retention.days=99.0")
    assert len(stored(context)) == 8


def test_settings_want_a_recipe(context: StageContext) -> None:
    answer = CliRunner().invoke(app, ["gc", "--set", "retention.days=1.0"])
    assert answer.exit_code == 2
    assert "--set needs --recipe" in answer.output


# recipe and the number of the delete at which the process is killed
GC_KILLED_AT_DELETE = """
import os, signal, sys
from ostinato.flows.cli import app
from ostinato.infra.platform.objects import ObjectStore

real, seen = ObjectStore.delete, []

def delete(store, key):
    seen.append(key)
    if len(seen) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    real(store, key)

ObjectStore.delete = delete
app(["gc", "--recipe", sys.argv[1]])
"""
KEPT = {"candidate/mine@3", "candidate/mine@4", "candidate/mine@6", "reinforced/mine@2"}
EXPIRED = {"candidate/mine@1", "candidate/mine@2", "candidate/mine@5", "reinforced/mine@1"}


def test_dry_run_changes_nothing_and_names_size_and_reason(context: StageContext) -> None:
    said = gc(context, "--dry-run")
    assert "candidate/mine@1, " in said
    assert "promoted before the newest 2" in said
    assert "older than 0 days" in said
    assert stored(context) == KEPT | EXPIRED
    assert context.ledger.events.recent("retention") == []


def test_old_checkpoints_go_and_what_serves_users_loads(context: StageContext) -> None:
    gc(context)
    assert stored(context) == KEPT
    for name in KEPT:
        assert context.directory_of(context.artifacts.get(name)).is_dir()
    told = {event.payload["artifact"] for event in context.ledger.events.recent("retention")}
    assert told == EXPIRED
    # problems, though old, serve the champion
    assert context.artifacts.find_damage(context.artifacts.get("problems/mine@1")) == []
    assert "0 items" in gc(context)


def test_without_a_table_nothing_goes(context: StageContext) -> None:
    recipe = context.settings.home.parent / "mine.toml"
    recipe.write_text(recipe.read_text().partition("[retention]")[0])
    assert "0 items" in gc(context)


def test_removed_checkpoint_is_named_and_its_stage_makes_it_again(context: StageContext) -> None:
    gone = context.artifacts.get("candidate/mine@5")
    parent = context.artifacts.get("candidate/mine@4")
    gc(context)
    with pytest.raises(StorageError, match=r"candidate/mine@5.*removed by `ostinato gc"):
        context.directory_of(gone)
    assert candidate(context, parent, 4) == gone
    assert (context.directory_of(gone) / "weights").read_text() == "of 4"


def test_users_are_not_rolled_back_to_removed_bytes(context: StageContext) -> None:
    gc(context)
    assert roll_back(context.ledger, LINE, None, "worse").champion == "candidate/mine@3"
    with pytest.raises(StorageError, match=r"candidate/mine@2.*removed by `ostinato gc"):
        roll_back(context.ledger, LINE, None, "worse still")
    current = context.ledger.promotions.current(LINE)
    assert current is not None
    assert current.checkpoint_id == "candidate/mine@3"


@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.nightly
def test_kill_at_any_delete_leaves_no_half_checkpoint_and_the_next_gc_ends_it(
    context: StageContext, call: int
) -> None:
    # a process of its own: a fork of this one would have its locks without the threads that hold them
    program = [sys.executable, "-c", GC_KILLED_AT_DELETE, recipe_of(context), str(call)]
    assert subprocess.run(program, check=False).returncode == -signal.SIGKILL
    assert stored(context) >= KEPT  # whole, all of them
    gc(context)
    assert stored(context) == KEPT
    assert "0 items" in gc(context)
    left = [key for key in context.objects.list("artifacts/candidate/") if key.endswith("weights")]
    assert len(left) == 3


def test_nothing_goes_while_a_stage_or_a_cycle_is_under_way(context: StageContext) -> None:
    folder = context.run_directory("scorecard", "f")
    folder.mkdir(parents=True)
    (folder / PROCESS).write_text(mark_process(os.getpid()).model_dump_json())
    store = Retention(context.settings)
    with pytest.raises(ConfigError, match="scorecard-f"):
        store.find(context.recipe)
    (folder / PROCESS).unlink()
    context.ledger.cycles.open(
        "tests-0", line=LINE, served="candidate/mine@4", from_watermark=0, to_watermark=1, at=1.0
    )
    with pytest.raises(ConfigError, match="tests-0"):
        store.find(context.recipe)


def test_weight_chain_of_a_removed_cycle_goes_with_it(context: StageContext) -> None:
    for version, cycle in ((1, "mine-0"), (4, "mine-3")):
        ref = context.artifacts.get(f"candidate/mine@{version}")
        asked = {"entry": "x", "fingerprint": "f", "request": {"cycle_id": cycle}}
        folder = context.run_directory(ref.kind, ref.fingerprint)
        (folder / "request.json").write_text(json.dumps(asked))
        context.objects.put_bytes(f"chains/chain-{cycle}/00000000/anchor", b"weights")
    gc(context)
    assert context.objects.list("chains/") == ["chains/chain-mine-3/00000000/anchor"]


def test_what_another_home_made_or_can_be_replayed_stays(context: StageContext) -> None:
    left = context.artifacts.get("reinforced/mine@1")
    asked = {"entry": "x", "fingerprint": "f", "request": {"learning": {"keep_for_replay": True}}}
    folder = context.run_directory(left.kind, left.fingerprint)
    (folder / "request.json").write_text(json.dumps(asked))
    (folder / "steps").mkdir()
    elsewhere = context.artifacts.get("candidate/mine@1")
    made = context.run_directory(elsewhere.kind, elsewhere.fingerprint)
    made.rename(made.with_name("candidate-of-another-home"))
    gc(context)
    assert stored(context) == KEPT | {"reinforced/mine@1", "candidate/mine@1"}
    (folder / "steps").rmdir()  # as `ostinato gc` does after a while: nothing can be computed again
    gc(context)
    assert stored(context) == KEPT | {"candidate/mine@1"}
