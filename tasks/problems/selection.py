"""The order in which candidates are tried, and the split of each proven candidate. The functions are pure, so the
same seed gives the same problems.
"""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ostinato.infra.platform.folders import is_below
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.tasks.problems.breaking.candidates import Candidate, draw_rank, take_turns
from ostinato.tasks.problems.breaking.definitions import (
    Definition,
    lines_at_margin,
    read_definitions,
)
from ostinato.tasks.problems.breaking.features import FeatureMaker
from ostinato.tasks.problems.breaking.multi_place import find_multi_place
from ostinato.tasks.problems.breaking.mutations import NOTICED_SHARES, mutate_function
from ostinato.tasks.problems.breaking.refactorings import RefactoringMaker
from ostinato.tasks.problems.config import Kind, ProblemsConfig, Quotas
from ostinato.tasks.problems.proving.baseline import Baseline
from ostinato.tasks.records import LineEdit, Split

_MAX_PARTS = 4
_DOCUMENTS = (".md", ".rst", ".txt")
Place = tuple[str, str, str]  # repository, path, symbol


@dataclass(frozen=True)
class Sources:
    """Breakable files of a repository and their definitions."""

    repository: PreparedRepository
    files: dict[str, bytes]
    definitions: dict[str, list[Definition]]

    @classmethod
    def read(cls, repository: PreparedRepository, mutated_paths: Sequence[str] = ()) -> "Sources":
        """The editable files, or only those below `mutated_paths` if there are any."""
        files = {
            path: content
            for path, content in repository.files.items()
            if repository.is_editable(path) and (not mutated_paths or is_below(path, mutated_paths))
        }
        found = read_definitions(files)
        return cls(repository, {path: files[path] for path in found}, found)

    def every_definition(self) -> list[Definition]:
        return [item for found in self.definitions.values() for item in found]

    def lines_of(self, path: str) -> list[str]:
        """The lines of a breakable file."""
        return self.files[path].decode().split("\n")

    def mutations_of(
        self, baseline: Baseline, config: ProblemsConfig
    ) -> dict[Place, Callable[[], Iterable[Candidate]]]:
        """A function that makes the mutations, for every place that may be mutated."""
        return {
            place: partial(mutate_definition, place[0], definition, self.lines_of(place[1]))
            for place, definition in find_functions(self, baseline, config).items()
        }

    @property
    def documents(self) -> dict[str, bytes]:
        """Content of the text files in UTF-8 that are no tests, by path."""
        return {
            path: content
            for path, content in self.repository.files.items()
            if path.endswith(_DOCUMENTS) and not self.repository.is_test(path)
            if content.decode(errors="replace").encode() == content
        }

    @property
    def tests(self) -> dict[str, bytes]:
        """Content of the Python test files, by path."""
        files = self.repository.files
        return {
            path: files[path]
            for path in files
            if path.endswith(".py") and self.repository.is_test(path)
        }


def find_functions(
    sources: Sources, baseline: Baseline, config: ProblemsConfig
) -> dict[Place, Definition]:
    """Functions that may be mutated: small enough, and called by stable tests."""
    found: dict[Place, Definition] = {}
    for path in sorted(sources.definitions):
        lines = sources.lines_of(path)
        names = Counter(item.qualified_name for item in sources.definitions[path])
        for definition in sources.definitions[path]:
            name = definition.qualified_name
            if config.plain_functions and not (definition.is_plain and names[name] == 1):
                continue
            if _is_small(definition, lines, config) and baseline.covering([definition.call_key]):
                found[sources.repository.name, path, name] = definition
    return found


def _is_small(definition: Definition, lines: Sequence[str], config: ProblemsConfig) -> bool:
    own = lines[definition.first_line - 1 : definition.last_line]
    return (
        not definition.is_class
        and definition.num_lines <= config.max_function_lines
        and sum(len(line) + 1 for line in own) <= config.max_function_characters
    )


def mutate_definition(
    repository: str, definition: Definition, lines: Sequence[str]
) -> Iterator[Candidate]:
    """Every single-line mutation of a function or method. `lines`: all lines of its file."""
    at_margin = lines_at_margin(definition, lines)
    if at_margin is None:
        return
    docstring = range(definition.docstring_line, definition.body_line)  # text, not code
    for mutation in mutate_function(at_margin):
        number = definition.first_line + mutation.line_number - 1
        if definition.docstring_line and number in docstring:
            continue
        gold = lines[number - 1]
        edit = LineEdit(
            path=definition.path,
            line_number=number,
            gold_text=gold,
            broken_text=gold[: len(gold) - len(mutation.gold_text)] + mutation.broken_text,
        )
        yield Candidate.at(
            definition,
            repository=repository,
            kind=Kind.MUTATION,
            operator=mutation.operator,
            edits=(edit,),
            touched=(definition.call_key,),
        )


def order_mutations(
    functions: Mapping[Place, Callable[[], Iterable[Candidate]]], config: ProblemsConfig
) -> Iterator[Candidate]:
    """One mutation of every function in turn, each of the operator furthest behind its share.

    The seed draws the order of functions, and of operators that are equally far behind. A function's
    mutations are made when its first turn comes.
    """
    seed = f"{config.seed}"
    remaining: dict[Place, dict[str, list[Candidate]]] = {}
    places = sorted(functions, key=lambda place: draw_rank(seed, *place[1:]))
    num_taken: Counter[str] = Counter()
    for _ in range(config.max_per_function):
        for place in places:
            if place not in remaining:
                remaining[place] = _sort_by_operator(functions[place](), config)
            by_operator = remaining[place]
            if by_operator:
                shares = {name: num_taken[name] / _weight(name, config) for name in by_operator}
                operator = min(shares, key=lambda n: (shares[n], draw_rank(seed, *place[1:], n)))
                num_taken[operator] += 1
                yield by_operator[operator].pop()
                if not by_operator[operator]:
                    del by_operator[operator]


def _sort_by_operator(
    found: Iterable[Candidate], config: ProblemsConfig
) -> dict[str, list[Candidate]]:
    """Mutations of one function by operator, in reverse order of use."""
    by_operator: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(
        found, key=lambda item: draw_rank(f"{config.seed}{item.candidate_id}"), reverse=True
    ):
        if candidate.operator not in config.operators_left_out:
            by_operator[candidate.operator].append(candidate)
    return by_operator


def _weight(operator: str, config: ProblemsConfig) -> float:
    return 1.0 if config.operator_mix == "even" else NOTICED_SHARES[operator]


def find_candidates(
    sources: Sources, baseline: Baseline, config: ProblemsConfig, quotas: Quotas
) -> dict[Kind, list[Candidate]]:
    """Candidates of every kind that is made from sources, at most as many as the quotas can use."""
    maker = FeatureMaker(
        sources.repository.name,
        sources.files,
        sources.definitions,
        sources.tests,
        documents=sources.documents,
        lines=range(config.min_deleted_lines, config.rules.max_changed_lines + 1),
    )
    max_tests = int(config.rules.max_failing_ratio * len(baseline.tests))
    ways: dict[str, Callable[[], Iterable[Candidate]]] = {
        "symbol": lambda: maker.features(config.seed),
        "skeleton": lambda: maker.skeletons(config.seed),
        "subject": lambda: maker.subjects(
            baseline.tests, baseline.covering, max_tests, config.seed
        ),
    }
    refactorings = RefactoringMaker(sources.repository, sources.definitions)

    def large_enough(found: Iterable[Candidate]) -> Iterator[Candidate]:
        return (item for item in found if _num_lines(item) >= config.min_deleted_lines)

    by_kind: dict[Kind, Callable[[], Iterable[Candidate]]] = {
        Kind.MUTATION: lambda: order_mutations(sources.mutations_of(baseline, config), config),
        Kind.DELETED_FUNCTION: lambda: large_enough(
            maker.functions(config.seed, config.deletion_levels)
        ),
        Kind.DELETED_FEATURE: lambda: large_enough(
            take_turns(ways[way]() for way in config.feature_ways)
        ),
        Kind.MULTI_PLACE: lambda: find_multi_place(
            sources.repository.name,
            [*find_functions(sources, baseline, config).values()],
            sources.lines_of,
            config.seed,
        ),
        Kind.REFACTORING: lambda: refactorings.candidates(config.seed),
    }
    wanted = {kind: round(quotas.of(kind) * quotas.trials_ratio) for kind in by_kind}
    return {
        kind: list(
            itertools.islice(
                (item for item in make() if baseline.covering(item.touched)), wanted[kind]
            )
        )
        if wanted[kind]
        else []
        for kind, make in by_kind.items()
    }


def _num_lines(candidate: Candidate) -> int:
    return candidate.draft("").num_changed_lines


def combine(
    proven: Sequence[Candidate], quotas: Quotas, seed: int, *, same_file: bool
) -> list[Candidate]:
    """Candidates that join two to four proven mutations of different functions.

    `same_file`: whether the mutations may share a file, which needs a fresh import in every run.
    """
    rng = random.Random(f"combine {seed} {[item.candidate_id for item in proven]}")
    wanted = round(quotas.combined * quotas.trials_ratio)
    found: dict[str, Candidate] = {}
    for _ in range(4 * wanted):
        if len(found) >= wanted or len(proven) < 2:
            break
        first = rng.choice(proven)
        fitting = [item for item in proven if _can_join(first, item, same_file=same_file)]
        parts: list[Candidate] = [first]
        for other in rng.sample(fitting, min(rng.randint(1, _MAX_PARTS - 1), len(fitting))):
            if all(_can_join(part, other, same_file=same_file) for part in parts):
                parts.append(other)
        if len(parts) > 1:
            candidate = _join(parts)
            found.setdefault(candidate.candidate_id, candidate)
    return list(found.values())


def _can_join(one: Candidate, other: Candidate, *, same_file: bool) -> bool:
    if (one.path, one.symbol) == (other.path, other.symbol):
        return False
    return one.path != other.path or same_file


def _join(parts: Sequence[Candidate]) -> Candidate:
    ordered = sorted(parts, key=lambda part: (part.path, part.first_line, part.candidate_id))
    return ordered[0].model_copy(
        update={
            "kind": Kind.COMBINED,
            "operator": f"{len(ordered)}_mutations",
            "edits": tuple(edit for part in ordered for edit in part.edits),
            "touched": tuple(dict.fromkeys(key for part in ordered for key in part.touched)),
        }
    )


def choose_held_out_functions(places: Iterable[Place], config: ProblemsConfig) -> frozenset[Place]:
    """Functions set aside for evaluation, drawn by the seed. At most a third of all."""
    drawn = sorted(places, key=lambda place: draw_rank(f"{config.seed}", "held-out", *place))
    return frozenset(drawn[: min(config.functions_held_out, len(drawn) // 3)])


def assign_splits(
    proven: Sequence[Candidate], held_out: frozenset[Place], config: ProblemsConfig
) -> dict[str, Split]:
    """Split of each proven candidate, by id. Candidates left over when all splits are full get none.

    The splits share no mutation. A function of `held_out` occurs in held_out_function alone.
    """
    splits: dict[str, Split] = {}
    whole = [candidate for candidate in proven if place_of(candidate) in held_out]
    for candidate in whole[: config.sizes.held_out_function]:
        splits[candidate.candidate_id] = Split.HELD_OUT_FUNCTION
    rest = sorted(
        (candidate for candidate in proven if place_of(candidate) not in held_out),
        key=lambda candidate: draw_rank(f"{config.seed}", "split", candidate.candidate_id),
    )
    others = (Split.HELD_OUT, Split.TRAIN, Split.DEMONSTRATION, Split.USER)
    wanted = sum(config.sizes.of(split) for split in others)
    share = min(1.0, len(rest) / wanted) if wanted else 0.0
    position = 0
    for split in others:
        size = round(config.sizes.of(split) * share)
        for candidate in rest[position : position + size]:
            splits[candidate.candidate_id] = split
        position += size
    return splits


def place_of(candidate: Candidate) -> Place:
    """The function that a candidate changes first."""
    return (candidate.repository, candidate.path, candidate.symbol)
