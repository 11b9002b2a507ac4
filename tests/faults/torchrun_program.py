"""A stage as `ostinato run` starts it, in each process of torchrun: `python -m
tests.faults.torchrun_program REQUEST DIRECTORY`.
"""

import sys
from pathlib import Path

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.launch import run_launched
from ostinato.infra.platform.cluster.services import interrupt_on_signals
from ostinato.infra.platform.settings import load_launch
from ostinato.tasks.pretraining.config import PretrainingRequest, PretrainingResult

ENTRY = "ostinato.tasks.pretraining.run:main"

if __name__ == "__main__":
    interrupt_on_signals()  # as the command does: torchrun ends ranks by SIGTERM, and the stage with them
    request = PretrainingRequest.model_validate_json(Path(sys.argv[1]).read_text())
    directory = Path(sys.argv[2])
    launch = load_launch()
    assert launch is not None
    run_launched(launch, lambda: run_child(ENTRY, request, PretrainingResult, directory=directory))
