"""Overlap of evaluated problems with training documents: whole right lines, and n-grams of words,
counted as for GPT-3 (arXiv:2005.14165, appendix C: 13 words, lower case, no punctuation).

Shapes: W words of a text, G n-grams of it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ostinato.infra.agent.regions import RegionError, open_region
from ostinato.models.rendering import Renderer
from ostinato.tasks.corpus.config import AnswerOverlap, NgramOverlap
from ostinato.tasks.corpus.source_code.functions import ProblemSource
from ostinato.tasks.records import Problem, Split

EVALUATED = (Split.HELD_OUT, Split.HELD_OUT_FUNCTION)
SHORTEST_ANSWER_CHARACTERS = 12  # shorter lines (return x) occur in any code
NGRAM_WORDS = 13
# Stages that train on attempts, and the split of their problems: a solved attempt contains the
# prompt and the right function.
STAGES_OF_PROBLEMS = {"RL": Split.TRAIN, "cycle": Split.USER}
_TAG = re.compile(r"<\|?\w+\|?>|</\w+>")  # special tokens and tags of lines
_BREAK = re.compile(rf"{_TAG.pattern}|\n")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def measure_overlap(
    source: ProblemSource, documents: Mapping[str, Sequence[Sequence[int]]], renderer: Renderer
) -> tuple[AnswerOverlap, ...]:
    """Overlap of each evaluated split with `documents` (by stage) and problems of RL and users."""
    texts = {
        split: [_text_of(problem, source) for problem in source.problems if problem.split is split]
        for split in (*EVALUATED, *STAGES_OF_PROBLEMS.values())
    }
    grams = _Ngrams([text for split in EVALUATED for text in texts[split]])
    wanted = {line for split in EVALUATED for text in texts[split] for line in text.answers}
    documents_with: Counter[str] = Counter()
    seen: dict[str, set[int]] = {}
    for stage, trained in documents.items():
        found_grams = seen[stage] = set()
        for token_ids in trained:
            text = renderer.decode(token_ids)
            documents_with.update({line.strip() for line in _BREAK.split(text)} & wanted)
            found_grams.update(grams.of([(word, False) for word in _words(text)]))
    for stage, split in STAGES_OF_PROBLEMS.items():
        seen[stage] = {gram for text in texts[split] for gram in grams.of_text(text)}
    found = []
    for split in EVALUATED:
        answers = [text.answers for text in texts[split] if text.answers]
        counts = [min(documents_with[line] for line in lines) for lines in answers]
        if texts[split]:
            ngrams = (_ngrams_of(stage, texts[split], grams, seen[stage]) for stage in seen)
            found.append(
                AnswerOverlap(
                    split=split,
                    problems=len(counts),
                    problems_with_answer=sum(count > 0 for count in counts),
                    median_documents=median(counts) if counts else 0.0,
                    ngrams=tuple(ngrams),
                )
            )
    return tuple(found)


@dataclass(frozen=True)
class _Text:
    """Words that a problem shows, and its right lines."""

    function: str
    answers: tuple[str, ...]  # all right lines if one is long enough, else none
    parts: tuple[tuple[tuple[str, bool], ...], ...]  # words, and whether they are of a right line


def _text_of(problem: Problem, source: ProblemSource) -> _Text:
    """The prompt, and the whole function with its right lines."""
    gold = {edit.line_number: edit.gold_text for edit in problem.edits if edit.path == problem.path}
    for block in problem.blocks:
        if block.path == problem.path:
            gold |= dict(enumerate(block.gold_lines, block.first_line))
    lines = dict(gold)
    try:
        file = source.repository(problem.repository).files[problem.path].decode()
        region = open_region(file, f"{problem.path}::{problem.symbol}")
        lines |= dict(enumerate(region.lines, region.first_line))
    except (KeyError, RegionError):  # it breaks no function, so only its own lines count
        pass
    answers = tuple(edit.gold_text.strip() for edit in problem.edits)
    is_long = any(len(answer) >= SHORTEST_ANSWER_CHARACTERS for answer in answers)
    shown = tuple(
        (word, number in gold) for number in sorted(lines) for word in _words(lines[number])
    )
    return _Text(
        function=f"{problem.repository}/{problem.path}::{problem.symbol}",
        answers=answers if is_long else (),
        parts=(tuple((word, False) for word in _words(problem.prompt)), shown),
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", _TAG.sub(" ", text).lower())


class _Ngrams:
    """Hashes of n-grams of evaluated problems, without those shared by several functions, which are
    the wording of prompts.
    """

    def __init__(self, texts: Iterable[_Text]) -> None:
        texts = list(texts)
        words = {word for text in texts for part in text.parts for word, _ in part}
        self._numbers = {word: number for number, word in enumerate(sorted(words), start=1)}
        functions: dict[int, set[str]] = defaultdict(set)
        self._wanted = np.zeros(0, dtype=np.uint64)
        for text in texts:
            for gram in self.of_text(text):
                functions[gram].add(text.function)
        own = sorted(gram for gram, names in functions.items() if len(names) == 1)
        self._wanted = np.asarray(own, dtype=np.uint64)

    def of_text(self, text: _Text) -> dict[int, bool]:
        """Hashes of a text's n-grams -> whether the n-gram holds a word of a right line."""
        found: dict[int, bool] = {}
        for part in text.parts:
            for gram, is_answer in self.of(part).items():
                found[gram] = found.get(gram, False) or is_answer
        return found

    def of(self, words: Sequence[tuple[str, bool]]) -> dict[int, bool]:
        """Like `of_text`, for a sequence of words."""
        numbers_W = np.fromiter((self._numbers.get(word, 0) for word, _ in words), dtype=np.uint64)
        count = len(numbers_W) - NGRAM_WORDS + 1
        if count < 1:
            return {}
        hashes_G = np.zeros(count, dtype=np.uint64)
        is_known_G = np.ones(count, dtype=bool)
        for offset in range(NGRAM_WORDS):
            window_G = numbers_W[offset : offset + count]
            hashes_G = (hashes_G + window_G) * _FACTOR
            hashes_G ^= hashes_G >> np.uint64(29)
            is_known_G &= window_G > 0
        if len(self._wanted):
            is_known_G &= np.isin(hashes_G, self._wanted)
        return {
            int(hashes_G[place]): any(
                is_answer for _, is_answer in words[place : place + NGRAM_WORDS]
            )
            for place in np.flatnonzero(is_known_G).tolist()
        }


def _ngrams_of(stage: str, texts: Iterable[_Text], grams: _Ngrams, seen: set[int]) -> NgramOverlap:
    found = list(_shares(texts, grams, seen))
    return NgramOverlap(
        stage=stage,
        words=NGRAM_WORDS,
        problems=len(found),
        problems_with_text=sum(share > 0 for share, _ in found),
        problems_with_answer=sum(has_answer for _, has_answer in found),
        median_share=median(share for share, _ in found) if found else 0.0,
    )


def _shares(texts: Iterable[_Text], grams: _Ngrams, seen: set[int]) -> Iterator[tuple[float, bool]]:
    """(share of its n-grams that was seen, whether one with an answer was) of each text with n-grams."""
    for text in texts:
        own = grams.of_text(text)
        if own:
            shared = own.keys() & seen
            yield len(shared) / len(own), any(own[gram] for gram in shared)
