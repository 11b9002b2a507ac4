"""Which candidates are tried, in which order, and which split each proven one goes to.

Pure functions of the configuration and the candidates: the same seed gives the same problems.

The splits do not overlap in a mutation (function, line, broken text). Functions of
`held_out_function` occur in no other split: nothing that is trained on ever shows one of them
broken.
"""

import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ostinato.tasks.problems.config import ProblemsConfig
from ostinato.tasks.problems.functions import Function
from ostinato.tasks.problems.mutations import Mutation
from ostinato.tasks.records import Split


def candidate_id(mutation: Mutation) -> str:
    """Identity of a mutation: stable over runs and machines."""
    function = mutation.function
    text = "\0".join(
        (*function.key, str(mutation.line_number), mutation.gold_text, mutation.broken_text)
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return f"{function.repository}-{function.name}-{mutation.operator}-{digest}"


def choose_held_out_functions(
    functions: Sequence[Function], config: ProblemsConfig
) -> frozenset[Function]:
    """Whole functions kept for evaluation, drawn by the seed; at most a quarter of all."""
    drawn = sorted(functions, key=lambda function: _rank(config.seed, "held-out", *function.key))
    return frozenset(drawn[: min(config.functions_held_out, len(functions) // 4)])


def order_candidates(mutations: Iterable[Mutation], config: ProblemsConfig) -> list[Mutation]:
    """Capped by function and operator, then dealt so that every function and operator comes early.

    Each function has a queue: first one mutation of every operator in a drawn order, then the next
    of each. The result takes one from every function's queue in turn.
    """
    groups: dict[tuple[str, ...], list[Mutation]] = defaultdict(list)
    for mutation in mutations:
        groups[(*mutation.function.key, mutation.operator)].append(mutation)
    hands: dict[tuple[str, ...], list[list[Mutation]]] = defaultdict(list)
    for key in sorted(groups):
        cap = config.operator_caps.get(key[-1], config.max_per_function_operator)
        shuffled = sorted(groups[key], key=lambda item: _rank(config.seed, candidate_id(item)))
        hands[key[:-1]].append(shuffled[:cap])
    queues: list[list[Mutation]] = []
    for key in sorted(hands, key=lambda key: _rank(config.seed, "order", *key)):
        rng = random.Random(f"{config.seed} {key}")
        rounds = [list(filter(None, deal)) for deal in itertools.zip_longest(*hands[key])]
        for deal in rounds:
            rng.shuffle(deal)
        queues.append([mutation for deal in rounds for mutation in deal])
    rows = itertools.zip_longest(*queues)
    return [mutation for row in rows for mutation in row if mutation is not None]


def assign_splits(
    proven: Sequence[Mutation], held_out_functions: frozenset[Function], config: ProblemsConfig
) -> dict[str, Split]:
    """Split of each proven candidate by id; those left over when all splits are full get none."""
    splits: dict[str, Split] = {}
    whole = [mutation for mutation in proven if mutation.function in held_out_functions]
    for mutation in whole[: config.sizes.held_out_function]:
        splits[candidate_id(mutation)] = Split.HELD_OUT_FUNCTION
    rest = sorted(
        (mutation for mutation in proven if mutation.function not in held_out_functions),
        key=lambda mutation: _rank(config.seed, "split", candidate_id(mutation)),
    )
    others = (Split.HELD_OUT, Split.TRAIN, Split.DEMONSTRATION, Split.USER)
    wanted = sum(config.sizes.of(split) for split in others)
    share = min(1.0, len(rest) / wanted) if wanted else 0.0
    position = 0
    for split in others:
        size = round(config.sizes.of(split) * share)
        for mutation in rest[position : position + size]:
            splits[candidate_id(mutation)] = split
        position += size
    return splits


def _rank(seed: int, *parts: str) -> str:
    return hashlib.sha256("\0".join((str(seed), *parts)).encode()).hexdigest()
