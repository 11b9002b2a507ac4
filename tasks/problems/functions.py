"""The functions of a repository that may carry a problem.

`Function` and finding them: whole top-level functions without decorators, small enough for the
recipe.
"""

import ast
from dataclasses import dataclass

from ostinato.infra.platform.syntax import parse_python
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.config import ProblemsConfig, RepositorySource


@dataclass(frozen=True)
class Function:
    """A top-level function with its text. Line numbers are 1-based in the file."""

    repository: str
    path: str
    name: str
    first_line: int
    last_line: int
    lines: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity over all repositories."""
        return (self.repository, self.path, self.name)


def find_functions(
    repository: PreparedRepository, source: RepositorySource, config: ProblemsConfig
) -> list[Function]:
    """Candidate functions of the mutated files, in file order.

    A name that is defined twice is left out.
    """
    found: list[Function] = []
    for path in source.mutated_paths:
        text = repository.files[path].decode()
        lines = text.split("\n")
        definitions = [
            node for node in parse_python(text).body if isinstance(node, ast.FunctionDef)
        ]
        names = [node.name for node in definitions]
        for node in definitions:
            last_line = node.end_lineno or node.lineno
            own_lines = tuple(lines[node.lineno - 1 : last_line])
            is_small = (
                len(own_lines) <= config.max_function_lines
                and sum(map(len, own_lines)) + len(own_lines) <= config.max_function_characters
            )
            if is_small and not node.decorator_list and names.count(node.name) == 1:
                found.append(
                    Function(repository.name, path, node.name, node.lineno, last_line, own_lines)
                )
    return found
