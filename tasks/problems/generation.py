"""All candidates of one repository, by kind, in the order in which they are tried.

The order and the caps: the same seed and sources give the same candidates.
"""

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.baseline import Baseline
from ostinato.tasks.problems.candidates import Candidate, edit_texts, make_id
from ostinato.tasks.problems.definitions import Definition, as_function, read_definitions
from ostinato.tasks.problems.deletions import DeletionMaker
from ostinato.tasks.problems.mutations import mutate_function
from ostinato.tasks.problems.set_config import Kind, ProblemSetConfig
from ostinato.tasks.records import LineEdit

_MAX_PARTS = 4


@dataclass(frozen=True)
class Sources:
    """A repository's breakable files and what is defined in them."""

    repository: PreparedRepository
    files: dict[str, bytes]
    definitions: dict[str, list[Definition]]

    @classmethod
    def read(cls, repository: PreparedRepository, mutated_paths: Sequence[str] = ()) -> "Sources":
        """The editable files, those below `mutated_paths` when there are any."""
        files = {
            path: content
            for path, content in repository.files.items()
            if repository.is_editable(path) and _is_wanted(path, mutated_paths)
        }
        found = read_definitions(files)
        return cls(repository, {path: files[path] for path in found}, found)

    @property
    def tests(self) -> dict[str, bytes]:
        """The test files."""
        files = self.repository.files
        return {
            path: files[path]
            for path in files
            if path.endswith(".py") and self.repository.is_test(path)
        }


def _is_wanted(path: str, roots: Sequence[str]) -> bool:
    return not roots or any(path == root or path.startswith(f"{root}/") for root in roots)


def generate(
    sources: Sources, baseline: Baseline, config: ProblemSetConfig
) -> dict[Kind, list[Candidate]]:
    """Candidates of every kind but combined and mined ones, at most what the quotas can use."""
    maker = DeletionMaker(
        sources.repository.name, sources.files, sources.definitions, sources.tests
    )
    every = {
        Kind.MUTATION: _mutations(sources, baseline, config),
        Kind.DELETED_FUNCTION: _shuffle(maker.functions(), config.seed),
        Kind.DELETED_FEATURE: _shuffle(maker.features(), config.seed),
    }
    return {
        kind: _limit([item for item in found if baseline.covering(item.touched)], kind, config)
        for kind, found in every.items()
    }


def _limit(found: list[Candidate], kind: Kind, config: ProblemSetConfig) -> list[Candidate]:
    return found[: round(config.quotas.of(kind) * config.quotas.trials_ratio)]


def _mutations(sources: Sources, baseline: Baseline, config: ProblemSetConfig) -> list[Candidate]:
    """Mutations of all functions that tests call, in the order in which they are tried."""
    found: list[Candidate] = []
    for path in sorted(sources.definitions):
        lines = sources.files[path].decode().split("\n")
        for definition in sources.definitions[path]:
            if definition.is_class or not baseline.covering([definition.call_key]):
                continue
            if definition.num_lines <= config.max_function_lines:
                found += mutate_definition(sources.repository.name, definition, lines)
    return order_mutations(found, config.seed, config.max_per_function)


def order_mutations(
    found: Sequence[Candidate], seed: int, max_per_function: int
) -> list[Candidate]:
    """One mutation of every function in turn, each of the operator that was taken least so far.

    The order of functions, and of operators that were taken equally often, is drawn by the seed.
    """
    hands: dict[tuple[str, str], dict[str, list[Candidate]]] = defaultdict(dict)
    for candidate in reversed(_shuffle(found, seed)):
        hand = hands[candidate.path, candidate.symbol]
        hand.setdefault(candidate.operator, []).append(candidate)
    waiting = sorted(hands, key=lambda place: _rank(f"{seed}", *place))
    num_taken: Counter[str] = Counter()
    ordered: list[Candidate] = []
    for _ in range(max_per_function):
        waiting = [place for place in waiting if hands[place]]
        for path, symbol in waiting:
            hand = hands[path, symbol]
            operator = min(
                hand, key=lambda name: (num_taken[name], _rank(f"{seed}", path, symbol, name))
            )
            num_taken[operator] += 1
            ordered.append(hand[operator].pop())
            if not hand[operator]:
                del hand[operator]
    return ordered


def mutate_definition(
    repository: str, definition: Definition, lines: Sequence[str]
) -> list[Candidate]:
    """Every single-line mutation of a function or method."""
    function = as_function(repository, definition, lines)
    if function is None:
        return []
    found: list[Candidate] = []
    skipped = range(definition.docstring_line, definition.body_line)  # text, not code
    for mutation in mutate_function(function):
        if definition.docstring_line and mutation.line_number in skipped:
            continue
        gold = lines[mutation.line_number - 1]
        margin = gold[: len(gold) - len(mutation.gold_text)]
        edit = LineEdit(
            path=definition.path,
            line_number=mutation.line_number,
            gold_text=gold,
            broken_text=margin + mutation.broken_text,
        )
        symbol, kind, operator = definition.qualified_name, Kind.MUTATION, mutation.operator
        found.append(
            Candidate(
                candidate_id=make_id(repository, symbol, kind, operator, edit_texts([edit], ())),
                repository=repository,
                kind=kind,
                operator=operator,
                path=definition.path,
                symbol=symbol,
                first_line=definition.decorator_line,
                last_line=definition.last_line,
                edits=(edit,),
                touched=(definition.call_key,),
            )
        )
    return found


def combine(
    proven: Sequence[Candidate], config: ProblemSetConfig, *, same_file: bool
) -> list[Candidate]:
    """Two to four proven mutations of different functions at once.

    `same_file`: whether parts may share a file, which needs a fresh import in every run.
    """
    rng = random.Random(f"combine {config.seed} {[item.candidate_id for item in proven]}")
    wanted = round(config.quotas.combined * config.quotas.trials_ratio)
    found: dict[str, Candidate] = {}
    for _ in range(4 * wanted):
        if len(found) >= wanted or len(proven) < 2:
            break
        first = rng.choice(proven)
        near = [item for item in proven if _go_together(first, item, same_file=same_file)]
        parts: list[Candidate] = [first]
        for other in rng.sample(near, min(rng.randint(1, _MAX_PARTS - 1), len(near))):
            if all(_go_together(part, other, same_file=same_file) for part in parts):
                parts.append(other)
        if len(parts) > 1:
            candidate = _join(parts)
            found.setdefault(candidate.candidate_id, candidate)
    return list(found.values())


def _go_together(one: Candidate, other: Candidate, *, same_file: bool) -> bool:
    if (one.path, one.symbol) == (other.path, other.symbol):
        return False
    return one.path != other.path or same_file


def _join(parts: Sequence[Candidate]) -> Candidate:
    ordered = sorted(parts, key=lambda part: (part.path, part.first_line, part.candidate_id))
    edits = tuple(edit for part in ordered for edit in part.edits)
    main, operator = ordered[0], f"{len(ordered)}_mutations"
    identity = make_id(main.repository, main.symbol, Kind.COMBINED, operator, edit_texts(edits, ()))
    return Candidate(
        candidate_id=identity,
        repository=main.repository,
        kind=Kind.COMBINED,
        operator=operator,
        path=main.path,
        symbol=main.symbol,
        first_line=main.first_line,
        last_line=main.last_line,
        edits=edits,
        touched=tuple(dict.fromkeys(key for part in ordered for key in part.touched)),
        parts=tuple(part.candidate_id for part in ordered),
    )


def _shuffle(found: Sequence[Candidate], seed: int) -> list[Candidate]:
    """An order drawn by content, the same whatever else is found."""
    return sorted(found, key=lambda candidate: _rank(f"{seed}{candidate.candidate_id}"))


def _rank(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
