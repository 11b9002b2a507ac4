"""A supervisor in a process of its own, for tests that end it: DIRECTORY STEPS RELEASE_FILE [ENTRY]."""

import sys
from pathlib import Path

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.services import interrupt_on_signals
from tests.unit.infra.platform.cluster.entries import CountRequest, CountResult

if __name__ == "__main__":
    interrupt_on_signals()  # as commands do
    entry = sys.argv[4] if len(sys.argv) > 4 else "count"
    request = CountRequest(steps=int(sys.argv[2]), release_file=sys.argv[3], grandchild=True)
    run_child(
        f"tests.unit.infra.platform.cluster.entries:{entry}",
        request,
        CountResult,
        directory=Path(sys.argv[1]),
    )
