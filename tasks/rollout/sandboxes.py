"""The boxes of one process: per repository an environment of sandboxes and a test server, opened when first needed.

Owns their sharing over all trajectories of the process and their end. Belongs to one event loop.
"""

from collections.abc import Iterable

from infra.errors import ProblemError
from infra.sandbox.environment import RepositoryEnvironment
from infra.sandbox.repository import PreparedRepository
from tasks.records import Problem


class Sandboxes:
    """All boxes of this process."""

    def __init__(
        self,
        repositories: Iterable[PreparedRepository],
        *,
        concurrent_trajectories: int,
    ) -> None:
        self._environments = {
            repository.name: RepositoryEnvironment.create(
                repository, concurrent_trajectories
            )
            for repository in repositories
        }

    def of(self, problem: Problem) -> RepositoryEnvironment:
        """The boxes for a problem; its repository must be the very one it was proven on."""
        environment = self._environments.get(problem.repository)
        if environment is None:
            known = ", ".join(sorted(self._environments))
            raise ProblemError(
                f"problem {problem.problem_id}: repository {problem.repository}, wanted one of {known}"
            )
        seen = environment.repository.fingerprint
        if seen != problem.repository_fingerprint:
            raise ProblemError(
                f"problem {problem.problem_id}: repository {problem.repository} has fingerprint "
                f"{seen}, wanted {problem.repository_fingerprint}; build the problems again"
            )
        return environment

    async def close(self) -> None:
        """Ends every box."""
        for environment in self._environments.values():
            await environment.close()
