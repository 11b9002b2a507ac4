"""Prompts of problems, in one of five wordings. None of them tells the fix.

The detailed wording names the place, the symptom and an example. The terse one has at most `terse_characters`
characters. The vague and described ones do not name the place. No text names a hidden test or quotes the removed code.
"""

import random
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from ostinato.infra.sandbox.function_calls import format_call, format_result
from ostinato.tasks.problems import descriptions
from ostinato.tasks.problems.breaking.candidates import Candidate
from ostinato.tasks.problems.config import Kind, PromptLevel, Wording
from ostinato.tasks.problems.proving.judging import ProofResult
from ostinato.tasks.records import FunctionOracle

_WORDING = Wording()
_EXAMPLE_CHARACTERS = 300
_MESSAGE_CHARACTERS = 160
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")  # differs from run to run
_DETAILED: dict[Kind, tuple[str, ...]] = {
    Kind.MUTATION: (
        "`{symbol}` in {path} of {repository} misbehaves. {symptom} {example}\n\nFind the cause in "
        "the code, correct it, and leave everything else as it is. The tests stay unchanged.",
        "There is a bug in {path}: {symbol} no longer does what it should. {symptom} {example}\n\n"
        "Please repair it without touching tests or the public interface.",
    ),
    Kind.COMBINED: (
        "Several things are wrong in {repository}; one of them shows in `{symbol}` ({path}). "
        "{symptom} {example}\n\nThere is more than one cause. Correct all of them and leave the "
        "tests unchanged.",
    ),
    Kind.MULTI_PLACE: (
        "`{symbol}` in {path} of {repository} misbehaves, and so does other code. {symptom} {example}\n\n"
        "All of it has one cause, which several places share. Correct each of them and leave the tests unchanged.",
    ),
    Kind.DELETED_FUNCTION: (
        "`{symbol}` in {path} of {repository} is not implemented. {purpose} {example}\n\nImplement "
        "it so that its callers work again; signature and behaviour must be what the rest of the "
        "package and its tests expect.",
    ),
    Kind.DELETED_FEATURE: (
        "The feature around `{symbol}` ({path}) is missing from {repository}. {purpose} {example}"
        "\n\nBuild it again, with whatever helpers it needs, and export it where users of the "
        "package look for it.",
    ),
    Kind.MINED_COMMIT: (
        "{message}\n\nThe change belongs in {repository}, most of it in {path}. {symptom}",
    ),
}
_TERSE: dict[Kind, tuple[str, ...]] = {
    Kind.MUTATION: (
        "{symbol} in {path} is broken. {symptom}",
        "{symbol} gives wrong results, see {path}. {symptom}",
        "Fix {symbol}. {symptom}",
    ),
    Kind.COMBINED: (
        "{symbol} and something near it broke at once. {symptom}",
        "A few tests of {symbol} and others fail, more than one cause. {symptom}",
    ),
    Kind.MULTI_PLACE: (
        "{symbol} and others are wrong for one reason, fix all places. {symptom}",
        "Same mistake in {symbol} and elsewhere. {symptom}",
    ),
    Kind.DELETED_FUNCTION: (
        "Implement {symbol} in {path}. {purpose}",
        "{symbol} raises NotImplementedError, fill it in. {purpose}",
    ),
    Kind.DELETED_FEATURE: (
        "Bring back {symbol} in {path}, helpers included. {purpose}",
        "{repository} needs {symbol} again. {purpose}",
    ),
    Kind.MINED_COMMIT: ("{message}", "{message} ({path})"),
}
_VAGUE: dict[Kind, tuple[str, ...]] = {
    Kind.MUTATION: (
        "Something around {topic} in {repository} is off since yesterday, can you look?",
        "Users say {topic} gives strange results. Please fix.",
        "{repository}: {topic} broke, no idea where.",
    ),
    Kind.COMBINED: (
        "{repository} is acting up in more than one place, {topic} among them. Please sort it out.",
    ),
    Kind.MULTI_PLACE: (
        "{topic} and more of {repository} went wrong with one change, please repair all of it.",
    ),
    Kind.DELETED_FUNCTION: (
        "{topic} does not work in {repository}, I think nobody ever finished it.",
        "We need {topic} working in {repository}.",
    ),
    Kind.DELETED_FEATURE: (
        "We want {topic} in {repository} like it used to be.",
        "Somebody took {topic} out of {repository}; we need it.",
    ),
    Kind.MINED_COMMIT: ("{topic} in {repository} needs work, see what the tests say.",),
}


def write_prompt(
    level: PromptLevel,
    candidate: Candidate,
    judgement: ProofResult,
    oracle: FunctionOracle | None,
    docstring: str,
    seed: int,
    wording: Wording = _WORDING,
) -> str:
    """The prompt in one wording. The same inputs give the same text. Without names, a vague prompt becomes a terse one
    if every text would hold a name.
    """
    rng = random.Random(f"prompt {seed} {candidate.candidate_id}")
    kind, repository = candidate.kind, candidate.repository
    if kind is Kind.MINED_COMMIT:  # its last part is the commit
        repository = repository.rpartition("-")[0]
    words = {
        "symbol": candidate.symbol,
        "path": candidate.path,
        "repository": repository,
        "topic": " ".join(topic_words(candidate.symbol))
        or candidate.path.rpartition("/")[2].removesuffix(".py"),
        "symptom": _symptom(judgement),
        "purpose": _purpose(docstring),
        "example": _example(oracle),
        "message": candidate.message,
    }
    match level:
        case PromptLevel.PLACE:
            return f"Fix {candidate.symbol} in {candidate.path}"
        case PromptLevel.DESCRIBED:
            return descriptions.write_prompt(repository, docstring)
        case PromptLevel.DETAILED:
            return _fill(rng.choice(_DETAILED[kind]), words)
        case PromptLevel.VAGUE if wording.vague_names or kind is Kind.MINED_COMMIT:
            return _fill(rng.choice(_VAGUE[kind]), words)
        case PromptLevel.VAGUE if unnamed := _write_unnamed(candidate, words, docstring, rng):
            return unnamed
        case _:
            terse = _fill(rng.choice(_TERSE[kind]), words)
            if len(terse) > wording.terse_characters:
                terse = terse[: wording.terse_characters - 3].rsplit(" ", 1)[0] + "..."
            return terse


def _write_unnamed(
    candidate: Candidate, words: Mapping[str, str], docstring: str, rng: random.Random
) -> str:
    """A vague prompt that holds no name of the change, with the function's purpose as its topic if there is one. Empty:
    every text holds a name.
    """
    sentence = descriptions.first_sentence(docstring)
    topics = [f'"{sentence}"'] if descriptions.is_usable(sentence, candidate.symbol) else []
    templates = rng.sample(_VAGUE[candidate.kind], len(_VAGUE[candidate.kind]))
    for topic in (*topics, "one feature", "something"):
        for repository in (words["repository"], "this package"):
            for template in templates:
                text = template.format(topic=topic, repository=repository)
                if not find_names(text, candidate):
                    return text
    return ""


def find_names(text: str, candidate: Candidate) -> list[str]:
    """Words of a text that are the name of a changed function, of its class, or of a changed file."""
    symbols = [candidate.symbol, *(name for _, _, name in candidate.touched)]
    names = [part for symbol in symbols for part in symbol.split(".")]
    names += [PurePosixPath(part.path).stem for part in (*candidate.edits, *candidate.blocks)]
    known = {name.strip("_").casefold() for name in names if not name.startswith("__")}
    return [word for word in re.findall(r"\w+", text) if word.strip("_").casefold() in known]


def choose_level(
    shares: Mapping[PromptLevel, float],
    candidate: Candidate,
    seed: int,
    *,
    is_described: bool = True,
) -> PromptLevel:
    """The wording of a problem, drawn by the shares. Mined and given problems have no description. They get one of
    the other wordings, or terse if the shares have no other, because terse quotes the author's text.
    """
    rng = random.Random(f"level {seed} {candidate.candidate_id}")
    levels = sorted(shares)
    level = rng.choices(levels, [shares[level] for level in levels])[0]
    if level is not PromptLevel.DESCRIBED or is_described:
        return level
    others = [each for each in levels if each is not level and shares[each] > 0]
    weights = [shares[each] for each in others]
    return rng.choices(others, weights)[0] if others else PromptLevel.TERSE


def _fill(template: str, words: Mapping[str, str]) -> str:
    text = template.format(**words)
    lines = [" ".join(line.split()) for line in text.split("\n")]
    return "\n".join(lines).strip()


def topic_words(symbol: str) -> tuple[str, ...]:
    """Words of the function's name and class, by which the vague wording names it."""
    name = symbol.rpartition(".")[2].strip("_")
    owner = symbol.rpartition(".")[0].rpartition(".")[2]
    return tuple(word.lower() for word in f"{owner}_{name}".split("_") if len(word) > 2)


def is_ambiguous(candidate: Candidate, level: PromptLevel, symbols: Iterable[str]) -> bool:
    """Whether the wording fits several functions of the repository, and no gap in the code tells which is meant.
    This can only be so for the vague wording of a problem in which all code is still there.

    `symbols`: qualified names of all definitions of the repository.
    """
    is_whole = candidate.kind in (Kind.MUTATION, Kind.COMBINED, Kind.MULTI_PLACE)
    if level is not PromptLevel.VAGUE or not is_whole:
        return False
    words = frozenset(topic_words(candidate.symbol))
    return any(
        words <= frozenset(topic_words(symbol)) for symbol in symbols if symbol != candidate.symbol
    )


def _symptom(judgement: ProofResult) -> str:
    message = _ADDRESS.sub("0x...", " ".join(judgement.error_message.split()))
    message = message[:_MESSAGE_CHARACTERS]
    if judgement.error_type in ("", "AssertionError") and not message:
        return "It runs, but the result is wrong."
    if judgement.error_type == "AssertionError":
        return f"A check says: {message}."
    suffix = f": {message}" if message else ""
    return f"It ends in {judgement.error_type}{suffix}."


def _purpose(docstring: str) -> str:
    """The first sentence of the docstring."""
    first = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence, dot, _ = first.partition(". ")
    return (sentence + dot).strip()[:_EXAMPLE_CHARACTERS]


def _example(oracle: FunctionOracle | None) -> str:
    if oracle is None:
        return ""
    for call in oracle.visible:
        result = format_result(call.result)
        text = f"For example {format_call(oracle.symbol, call.arguments)} should give {result}."
        if result and len(text) <= _EXAMPLE_CHARACTERS:
            return text
    return ""
