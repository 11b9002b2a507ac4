"""How much of the evaluated problems' answers stands in the documents that were trained on."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from ostinato.models.rendering import Renderer
from ostinato.tasks.corpus.config import AnswerOverlap
from ostinato.tasks.records import Problem, Split

EVALUATED = (Split.HELD_OUT, Split.HELD_OUT_FUNCTION)
SHORTEST_ANSWER_CHARACTERS = 12  # shorter lines (return x) stand in any code
_BREAK = re.compile(r"<\|?\w+\|?>|</\w+>|\n")  # special tokens and line ends


def measure_overlap(
    problems: Iterable[Problem], documents: Iterable[Sequence[int]], renderer: Renderer
) -> tuple[AnswerOverlap, ...]:
    """Per evaluated split, in how many training documents the problems' right lines stand."""
    answers = {
        split: [
            tuple(edit.gold_text.strip() for edit in problem.edits)
            for problem in problems_of
            if any(
                len(edit.gold_text.strip()) >= SHORTEST_ANSWER_CHARACTERS for edit in problem.edits
            )
        ]
        for split, problems_of in _by_split(problems).items()
    }
    wanted = {line for found in answers.values() for lines in found for line in lines}
    documents_with: Counter[str] = Counter()
    for token_ids in documents:
        lines = {line.strip() for line in _BREAK.split(renderer.decode(token_ids))}
        documents_with.update(lines & wanted)
    return tuple(
        _summarise(split, [min(documents_with[line] for line in lines) for lines in found])
        for split, found in answers.items()
        if found
    )


def _by_split(problems: Iterable[Problem]) -> dict[Split, list[Problem]]:
    chosen: dict[Split, list[Problem]] = {split: [] for split in EVALUATED}
    for problem in problems:
        if problem.split in chosen:
            chosen[problem.split].append(problem)
    return chosen


def _summarise(split: Split, counts: Sequence[int]) -> AnswerOverlap:
    return AnswerOverlap(
        split=split,
        problems=len(counts),
        problems_with_answer=sum(count > 0 for count in counts),
        median_documents=median(counts),
    )
