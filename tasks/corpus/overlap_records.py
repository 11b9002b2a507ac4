"""What the overlap of evaluated problems with training documents comes to."""

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.tasks.records import Split


class NgramOverlap(Record):
    """N-grams of words that one split's problems share with what one stage trains on."""

    stage: str
    words: int = Field(description="of an n-gram")
    problems: int = Field(description="that have n-grams of their own, in prompt or function")
    problems_with_text: int = Field(description="of which the stage trains on at least one")
    problems_with_answer: int = Field(description="on one with a word of a right line")
    median_share: float = Field(description="of a problem's n-grams, median over problems")


class AnswerOverlap(Record):
    """Problems of one evaluated split whose text stands in training documents."""

    split: Split
    problems: int = Field(description="whose right line is long enough to be told from others")
    problems_with_answer: int
    """whose right lines stand in some document that is trained on: shards, demonstrations,
    documents that locate, conversations of the user"""
    median_documents: float = Field(description="documents that hold them, median over problems")
    ngrams: tuple[NgramOverlap, ...] = ()
    """by stage; empty: not measured, an earlier version made this"""
