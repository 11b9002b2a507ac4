"""A supervisor in a process of its own, for tests that kill it: DIRECTORY STEPS RELEASE_FILE."""

import sys
from pathlib import Path

from infra.cluster.child import run_child
from tests.unit.infra.cluster.entries import CountRequest, CountResult

if __name__ == "__main__":
    request = CountRequest(steps=int(sys.argv[2]), release_file=sys.argv[3], grandchild=True)
    run_child(
        "tests.unit.infra.cluster.entries:count",
        request,
        CountResult,
        directory=Path(sys.argv[1]),
    )
