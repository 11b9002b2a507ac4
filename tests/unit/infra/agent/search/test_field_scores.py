"""What a definition is called counts by how much of it the question says."""

import numpy as np
import pytest

from ostinato.infra.agent.search.chunk_cache import features_of
from ostinato.infra.agent.search.chunks import Chunk
from ostinato.infra.agent.search.field_scores import (
    BODY_ONLY,
    BY_FIELD,
    ChunkPostings,
    FieldRule,
    score_words,
)
from ostinato.models.search_encoder.code_words import FIELDS, describe_code, split_words

NAMES = ("load", "load_later_from_disk", "store", "load_load", "")
OFF = FieldRule(0.0, 1.0, 0.5)


def segment_of(names: tuple[str, ...]) -> ChunkPostings:
    chunks, features = [], []
    for number, name in enumerate(names):
        path, text = f"kit/m{number}.py", f"def {name}(value):\n    return value"
        chunks.append(Chunk(path, 1, 2, name, text))
        features.append(features_of(describe_code(path, name, text), np.zeros(0, dtype=np.float32)))
    return ChunkPostings(chunks, features)


def scores(question: str, rules: tuple[FieldRule, ...]) -> np.ndarray:
    segment = segment_of(NAMES)
    return score_words(segment, split_words(question), [segment.statistics], rules=rules)


def test_coverage_is_the_share_of_the_name_that_the_question_says() -> None:
    rules = tuple(OFF._replace(coverage=2.0) if field == "name" else OFF for field in FIELDS)
    assert scores("Load it from a disk", rules) == pytest.approx([2.0, 1.5, 0.0, 2.0, 0.0])
    assert not scores("nothing here", rules).any()


def test_a_name_said_whole_stands_above_one_said_in_part() -> None:
    found = scores("load the value", BY_FIELD)
    assert found[0] > found[1] > found[2]


def test_plain_bm25_knows_no_names() -> None:
    assert all(rule.coverage == 0 for rule in BODY_ONLY)
