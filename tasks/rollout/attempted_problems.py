"""Problems of a set that a harness may attempt."""

import logging
from collections import Counter
from collections.abc import Iterable

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.serving.attempts.layers import paths_installed_by
from ostinato.tasks.records import Problem

logger = logging.getLogger(__name__)


def choose_attempted(problems: Iterable[Problem], harness: HarnessConfig) -> list[Problem]:
    """All problems except those of packages that a foreign program contains. ProblemError if none is left."""
    problems = list(problems)
    if harness.is_builtin:
        return problems
    contained = paths_installed_by(harness.foreign_program(), {one.path for one in problems})
    left_out = Counter(one.repository for one in problems if one.path in contained)
    if left_out:
        counts = dict(left_out)
        logger.warning("problems left out %s", fields(program=harness.program, packages=counts))
    if problems and left_out.total() == len(problems):
        raise ProblemError(
            f"all {len(problems)} problems are of packages that harness.program {harness.program!r} brings "
            f"too ({', '.join(left_out)}), wanted problems of other packages: an agent finds the original code there"
        )
    return [one for one in problems if one.path not in contained]
