"""Compiled loops of the draft lookup: find guesses, count how often they hold, remember answers.

The arrays are described in `Lookup` (models/decode/drafts/speculation.py).

Shapes: S slots, C positions, B decoding slots, O orders (lengths of the tables), N entries of a
table, K kinds of guess, w drafts in a step.
"""

import numba
import numpy as np

MATCH_TOKENS = 2  # shorter matches in the context hold too rarely
LONGEST_MATCH_TOKENS = 12  # longer matches count as equal; the latest of equals is taken
ORDERS = (2, 4, 8, 16)  # lengths of the token runs that the memory is keyed by
_LEAST_PROBABILITY = np.float32(0.05)  # a chain of drafts ends if it is less likely to hold
_MAX_VOTES = 64  # an entry's votes are halved at this count, so that old answers count less
_FIRM_VOTES = 4  # with this many, an entry loses votes to a colliding key instead of its place
_MAX_GUESSES = 1024  # a kind's counts are halved at this count, so that recent guesses dominate
_TAG, _TOKEN, _HITS, _VOTES = range(4)  # columns of an entry
_LEVELS, _SHARES = 4, 9  # votes 1, 2, 4, 8 and more; the token's share of them in eighths
_SAME, _DIFFERS = 1, 2  # the context's guess compared with the memory's; 0: it has none
_MEMORY_KINDS = len(ORDERS) * _LEVELS * _SHARES * 3
KINDS = _MEMORY_KINDS + 2 * (LONGEST_MATCH_TOKENS + 1)


@numba.njit(cache=True)
def propose_drafts(
    tokens_SC,
    is_stop_SV,
    limit_S,
    slots_B,
    context_S,
    drafted,
    probability,
    costs_w,
    entries_ON4,
    held_K,
    seen_K,
):
    """See `Lookup.propose`."""
    most = len(costs_w) - 1
    expected_w = np.zeros(most + 1, np.float32)
    lengths_B = np.zeros(len(slots_B), np.int64)
    for index in range(len(slots_B)):
        slot = slots_B[index]
        first = context_S[slot] + drafted
        most_drafts = min(most, limit_S[slot] - 1 - first)
        lengths_B[index] = _draft_chain(
            tokens_SC[slot],
            first,
            most_drafts,
            is_stop_SV[slot],
            probability,
            expected_w,
            entries_ON4,
            held_K,
            seen_K,
        )
    best, total = 0, np.float32(len(slots_B)) * (np.float32(1.0) + drafted * probability)
    best_rate = total / costs_w[0]
    for count in range(1, most + 1):
        total += expected_w[count]
        if total > best_rate * costs_w[count]:
            best, best_rate = count, total / costs_w[count]
    for index in range(len(slots_B)):
        tokens_C, first = tokens_SC[slots_B[index]], context_S[slots_B[index]] + drafted
        for place in range(first + lengths_B[index], first + best):
            tokens_C[place] = tokens_C[place - 1]
    return best, best_rate / len(slots_B)


@numba.njit(cache=True)
def _draft_chain(
    tokens_C, first, most, is_stop_V, probability, expected_w, entries_ON4, held_K, seen_K
):
    """Writes guesses from `first` on, each assuming that the guesses before it hold. Adds to
    `expected_w[n]` the probability that the first n hold. Returns the number of guesses.
    """
    place, depth, end = -1, 0, first
    while end - first < most:
        if place >= 0 and tokens_C[place] == tokens_C[end - 1]:
            place, depth = place + 1, min(depth + 1, LONGEST_MATCH_TOKENS)  # still the longest
        else:
            place, depth = _longest_match(tokens_C, end)
        token, kind = _guess(tokens_C, end, place, depth, entries_ON4, held_K, seen_K)
        if token < 0:
            break
        probability *= held_K[kind] / seen_K[kind]
        if probability < _LEAST_PROBABILITY:
            break
        tokens_C[end] = token
        end += 1
        expected_w[end - first] += probability
        if is_stop_V[token]:
            break
    return end - first


@numba.njit(cache=True)
def _guess(tokens_C, end, place, depth, entries_ON4, held_K, seen_K):
    """(token, kind) guessed by the memory or the context, whichever kind held more often. -1: none."""
    token, kind, own_token, own_kind = _candidates(tokens_C, end, place, depth, entries_ON4)
    if token < 0 or (
        own_token >= 0 and held_K[own_kind] * seen_K[kind] > held_K[kind] * seen_K[own_kind]
    ):
        return own_token, own_kind
    return token, kind


@numba.njit(cache=True)
def _candidates(tokens_C, end, place, depth, entries_ON4):
    """(token, kind) of the memory and of the context. The context's are -1 where both agree."""
    token, kind = _recall(tokens_C, end, entries_ON4)
    if place < 0:
        return token, kind, -1, -1
    own_token, own_kind = tokens_C[place], _MEMORY_KINDS + 2 * depth
    if token < 0:
        return token, kind, own_token, own_kind
    if token == own_token:
        return token, kind + _SAME, -1, -1
    return token, kind + _DIFFERS, own_token, own_kind + 1


@numba.njit(cache=True)
def _longest_match(tokens_C, end):
    """(place, length): the place after the longest earlier match of the last tokens, and its
    length. Place -1: none.
    """
    best, best_depth = -1, MATCH_TOKENS - 1
    if end <= MATCH_TOKENS:
        return -1, 0
    last, before = tokens_C[end - 1], tokens_C[end - 2]
    for place in range(end - 1, MATCH_TOKENS - 1, -1):
        if tokens_C[place - 1] != last or tokens_C[place - 2] != before:
            continue
        depth = MATCH_TOKENS
        while (
            depth < min(place, LONGEST_MATCH_TOKENS)
            and tokens_C[place - 1 - depth] == tokens_C[end - 1 - depth]
        ):
            depth += 1
        if depth > best_depth:
            best, best_depth = place, depth
            if depth == LONGEST_MATCH_TOKENS:
                break
    return best, best_depth if best >= 0 else 0


@numba.njit(cache=True)
def _recall(tokens_C, end, entries_ON4):
    """(token, kind) that the memory holds for the longest known run of last tokens. -1: none."""
    size = entries_ON4.shape[1]
    token, kind, key = -1, -1, np.uint64(0)
    if size == 0:
        return token, kind
    for order in range(len(ORDERS)):
        if ORDERS[order] > end:
            break
        key = _lengthen(key, order, tokens_C, end)
        entry = entries_ON4[order, np.int64(key >> np.uint64(32)) & (size - 1)]
        if entry[_VOTES] and entry[_TAG] == np.int32(key & np.uint64(0x7FFFFFFF)):
            votes, level = entry[_VOTES], 0
            while level < _LEVELS - 1 and votes >> (level + 1):
                level += 1
            share = (_SHARES - 1) * entry[_HITS] // votes
            token = np.int64(entry[_TOKEN])
            kind = ((order * _LEVELS + level) * _SHARES + share) * 3
    return token, kind


@numba.njit(cache=True)
def _lengthen(key, order, tokens_T, end):
    """Extends the key of the previous order to the ORDERS[order] tokens before `end`. The finaliser
    of splitmix64 mixes each token in.
    """
    for length in range(ORDERS[order - 1] if order else 0, ORDERS[order]):
        key = (key ^ np.uint64(tokens_T[end - 1 - length] + 1)) * np.uint64(0xBF58476D1CE4E5B9)
        key = key ^ (key >> np.uint64(29))
    return key


@numba.njit(cache=True)
def learn_answer(tokens_T, start, entries_ON4, held_K, seen_K):
    """See `Lookup.learn`. Guesses are counted before the memory learns the answer, since it did not
    hold the answer while it was sampled.
    """
    place, depth = -1, 0
    for end in range(max(start, 1), len(tokens_T)):
        if place >= 0 and tokens_T[place] == tokens_T[end - 1]:
            place, depth = place + 1, min(depth + 1, LONGEST_MATCH_TOKENS)
        else:
            place, depth = _longest_match(tokens_T, end)
        token, kind, own_token, own_kind = _candidates(tokens_T, end, place, depth, entries_ON4)
        if token >= 0:
            _count_guess(kind, token == tokens_T[end], held_K, seen_K)
        if own_token >= 0:
            _count_guess(own_kind, own_token == tokens_T[end], held_K, seen_K)
    if entries_ON4.shape[1]:
        for end in range(max(start, 1), len(tokens_T)):
            _remember(tokens_T, end, entries_ON4)


@numba.njit(cache=True)
def _count_guess(kind, has_held, held_K, seen_K):
    held_K[kind] += has_held
    seen_K[kind] += 1
    if seen_K[kind] > _MAX_GUESSES:
        held_K[kind] /= 2
        seen_K[kind] /= 2


@numba.njit(cache=True)
def _remember(tokens_T, end, entries_ON4):
    """Votes for the token at `end` in the entries of the tokens before it. An entry of other tokens
    is replaced if it has fewer than `_FIRM_VOTES` votes, else it loses half of them.
    """
    size = entries_ON4.shape[1]
    key = np.uint64(0)
    for order in range(len(ORDERS)):
        if ORDERS[order] > end:
            break
        key = _lengthen(key, order, tokens_T, end)
        entry = entries_ON4[order, np.int64(key >> np.uint64(32)) & (size - 1)]
        tag = np.int32(key & np.uint64(0x7FFFFFFF))
        if entry[_VOTES] == 0 or (entry[_TAG] != tag and entry[_VOTES] < _FIRM_VOTES):
            entry[_TAG], entry[_TOKEN], entry[_HITS], entry[_VOTES] = tag, tokens_T[end], 1, 1
            continue
        if entry[_TAG] == tag:
            entry[_VOTES] += 1
            if entry[_TOKEN] == tokens_T[end]:
                entry[_HITS] += 1
            elif entry[_HITS] <= 1 or 3 * entry[_HITS] < entry[_VOTES]:
                entry[_TOKEN], entry[_HITS], entry[_VOTES] = tokens_T[end], 1, 2
        if entry[_TAG] != tag or entry[_VOTES] >= _MAX_VOTES:
            entry[_HITS] = (entry[_HITS] + 1) // 2
            entry[_VOTES] //= 2
