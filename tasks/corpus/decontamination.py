"""Keeps evaluation, RL and user problems out of training data before RL."""

from collections.abc import Iterable, Sequence

from ostinato.tasks.corpus.source_code.functions import CodeFunction
from ostinato.tasks.problems.breaking.mutations import Mutation
from ostinato.tasks.records import Problem, Split

LINE_LIMIT_CHARACTERS = 16  # shorter lines (return x) occur in any code


class Guard:
    """The broken lines that must not be trained on."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self._reserved: set[tuple[str, str, str]] = set()
        self._broken_lines: set[str] = set()
        self._held_out_functions: set[tuple[str, str]] = set()
        self.num_dropped = 0
        for problem in problems:
            if problem.split is Split.HELD_OUT_FUNCTION:
                self._held_out_functions.add((problem.path, problem.symbol))
            if problem.split is Split.DEMONSTRATION:
                continue
            for edit in problem.edits:
                self._reserved.add((problem.path, problem.symbol, edit.broken_text.strip()))
                held_out = problem.split in (Split.HELD_OUT, Split.HELD_OUT_FUNCTION)
                line = edit.broken_text.strip()
                if held_out and len(line) >= LINE_LIMIT_CHARACTERS:
                    self._broken_lines.add(line)

    def allowed(self, functions: Sequence[CodeFunction]) -> list[CodeFunction]:
        """The functions that documents may contain: all that no evaluation holds out as a whole."""
        return [item for item in functions if item.key not in self._held_out_functions]

    def forbids(self, function: CodeFunction, mutation: Mutation) -> bool:
        """Whether a self-made mutation is a reserved problem or equals a held-out broken line."""
        line = mutation.broken_text.strip()
        forbidden = (*function.key, line) in self._reserved or line in self._broken_lines
        self.num_dropped += forbidden
        return forbidden

    def forbids_text(self, text: str) -> bool:
        """Whether general code contains a held-out broken line."""
        forbidden = any(line.strip() in self._broken_lines for line in text.split("\n"))
        self.num_dropped += forbidden
        return forbidden
