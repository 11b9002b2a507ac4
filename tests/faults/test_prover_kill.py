"""A prover that dies in the middle of a problem set: its work is done again and the set is the
same.
"""

import os
import signal
import threading
import time

import psutil
import pytest

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.settings import Settings
from ostinato.tasks.problems import set_run
from ostinato.tasks.problems.set_config import (
    PackageSource,
    ProblemSetConfig,
    ProblemSetRequest,
    Quotas,
    ValidityRules,
)
from ostinato.tasks.records import Split
from tests.fakes.repositories import WORDKIT, write_archive

CONFIG = ProblemSetConfig(
    packages=(PackageSource(**WORDKIT.model_dump() | {"mutated_paths": (), "split": Split.TRAIN}),),
    quotas=Quotas(mutation=24, deleted_function=4, deleted_feature=0, combined=2),
    rules=ValidityRules(max_failing_ratio=0.6),
)


def build(tmp_path, name, workers):
    write_archive(WORDKIT, tmp_path / "archives")
    directory = tmp_path / name
    directory.mkdir()
    workspace = Workspace.open(directory, Settings(home=tmp_path / "home"))
    request = ProblemSetRequest(
        config=CONFIG, archives_directory=tmp_path / "archives", workers=workers
    )
    set_run.main(request, workspace)
    return (directory / "problems" / "problems.jsonl").read_text()


def kill_prover_once(journal, killed):
    """SIGKILL the actor's process as soon as the journal shows that judging began."""
    while not killed.is_set():
        if journal.exists() and journal.stat().st_size:
            for process in psutil.Process().children(recursive=True):
                if "Prover" in " ".join(process.cmdline()[:1]):
                    os.kill(process.pid, signal.SIGKILL)
                    killed.set()
                    return
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_prover_is_replaced_and_the_set_is_the_same(tmp_path):
    killed = threading.Event()
    journal = tmp_path / "ray" / "judged" / "wordkit.jsonl"
    killer = threading.Thread(target=kill_prover_once, args=(journal, killed), daemon=True)
    killer.start()
    on_ray = build(tmp_path, "ray", 1)
    assert killed.is_set()
    in_process = build(tmp_path, "local", 0)
    assert on_ray.splitlines() == in_process.splitlines()
    assert on_ray.count("\n") > 20
