"""A supervisor in a process of its own, for tests that kill it: DIRECTORY STEPS RELEASE_FILE."""

import signal
import sys
from pathlib import Path

from ostinato.infra.platform.cluster.child import run_child
from tests.unit.infra.platform.cluster.entries import CountRequest, CountResult

if __name__ == "__main__":
    # a shell that starts tests in the background hands down an ignored SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = CountRequest(steps=int(sys.argv[2]), release_file=sys.argv[3], grandchild=True)
    run_child(
        "tests.unit.infra.platform.cluster.entries:count",
        request,
        CountResult,
        directory=Path(sys.argv[1]),
    )
