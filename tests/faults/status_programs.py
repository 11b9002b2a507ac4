"""Children that the status tests start, stop and kill."""

import subprocess
import sys
import time
from pathlib import Path

from pydantic import BaseModel

from ostinato.infra.platform.cluster.ranks import marked_ranks
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import StorageError

STAND = "tests.faults.status_programs:stand"
FAIL = "tests.faults.status_programs:fail"
STANDING = "standing"
RANK = """
import sys, time
from pathlib import Path
from ostinato.infra.platform.cluster.ranks import marked_rank
with marked_rank(Path(sys.argv[1]), int(sys.argv[2])):
    time.sleep(600)
"""


class StandRequest(BaseModel):
    """Wait for a file, with some ranks beside this process."""

    release_file: str
    num_ranks: int = 0


class StandResult(BaseModel):
    """Nothing."""


def stand(request: StandRequest, workspace: Workspace) -> StandResult:
    """Makes a little progress and waits until the release file is there."""
    directory = workspace.directory
    workspace.progress.update(1, 3, "standing")
    ranks = [
        subprocess.Popen([sys.executable, "-P", "-c", RANK, str(directory), str(rank)])
        for rank in range(request.num_ranks)
    ]
    while len(marked_ranks(directory)) < request.num_ranks:
        time.sleep(0.02)
    (directory / STANDING).touch()
    while not Path(request.release_file).exists():
        time.sleep(0.05)
    for process in ranks:
        process.kill()
        process.wait()
    return StandResult()


def fail(request: StandRequest, workspace: Workspace) -> StandResult:
    """Ends with an error."""
    raise StorageError(f"no space left in {workspace.directory} for {request.release_file}")
