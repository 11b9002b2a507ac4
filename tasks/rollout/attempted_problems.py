"""Problems of a set that a harness may attempt."""

import logging
from collections import Counter
from collections.abc import Iterable

from ostinato.infra.agent.config import HarnessConfig
from ostinato.infra.platform.errors import ProblemError
from ostinato.infra.platform.telemetry import fields
from ostinato.infra.sandbox.egress.config import SandboxConfig
from ostinato.infra.sandbox.egress.door import packages_of_pip
from ostinato.infra.serving.attempts.layers import paths_installed_by, paths_of
from ostinato.tasks.records import Problem

logger = logging.getLogger(__name__)


def choose_attempted(
    problems: Iterable[Problem], harness: HarnessConfig, sandboxes: SandboxConfig
) -> list[Problem]:
    """All problems except those of packages that a foreign program, or pip in a box with a package index, contains.
    ProblemError if none is left.
    """
    problems = list(problems)
    paths, contained = {one.path for one in problems}, set[str]()
    if not harness.is_builtin:
        contained |= paths_installed_by(harness.foreign_program(), paths)
    if sandboxes.egress.has_index:
        contained |= paths_of(packages_of_pip(), paths)
    left_out = Counter(one.repository for one in problems if one.path in contained)
    brought_by = (
        f"harness.program {harness.program!r} or sandbox.egress.allow {sandboxes.egress.allow}"
    )
    if left_out:
        logger.warning("problems left out %s", fields(by=brought_by, packages=dict(left_out)))
    if problems and left_out.total() == len(problems):
        raise ProblemError(
            f"all {len(problems)} problems are of packages that {brought_by} brings too ({', '.join(left_out)}), "
            "wanted problems of other packages: an agent finds the original code there"
        )
    return [one for one in problems if one.path not in contained]
