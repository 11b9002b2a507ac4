"""An RL run's supervisor in a process of its own, for tests that kill parts of it: HOME."""

import sys
from pathlib import Path

from ostinato.infra.platform.cluster.child import run_child
from ostinato.infra.platform.cluster.services import interrupt_on_signals
from ostinato.infra.platform.settings import load_settings
from ostinato.tasks.reinforcement.records import ReinforcementRequest, ReinforcementResult


def main() -> None:
    """Runs the request of the home's file to its end."""
    interrupt_on_signals()
    home = Path(sys.argv[1])
    request = ReinforcementRequest.model_validate_json((home / "request.json").read_bytes())
    run_child(
        "ostinato.tasks.reinforcement.run:main",
        request,
        ReinforcementResult,
        directory=home / "run",
        settings=load_settings(),
    )


if __name__ == "__main__":
    main()
