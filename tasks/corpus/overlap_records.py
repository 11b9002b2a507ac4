"""What the overlap of evaluated problems with training documents comes to."""

from pydantic import Field

from ostinato.infra.platform.record import Record
from ostinato.tasks.records import Split


class NgramOverlap(Record):
    """N-grams of words that one split's problems share with what one stage trains on."""

    stage: str
    words: int = Field(description="words per n-gram")
    problems: int = Field(
        description="problems that have n-grams of their own, in prompt or function"
    )
    problems_with_text: int = Field(
        description="problems of which the stage trains on at least one n-gram"
    )
    problems_with_answer: int = Field(
        description="problems of which the stage trains on an n-gram that holds a word of a right line"
    )
    median_share: float = Field(
        description="share of a problem's n-grams that are trained on, median over problems"
    )


class AnswerOverlap(Record):
    """Problems of one evaluated split whose text stands in training documents."""

    split: Split
    problems: int = Field(
        description="problems with a right line that is long enough to be told from others"
    )
    problems_with_answer: int
    """problems with right lines that stand in some document that is trained on: shards, demonstrations,
    documents that locate, conversations of the user"""
    median_documents: float = Field(description="documents that hold them, median over problems")
    ngrams: tuple[NgramOverlap, ...] = ()
    """overlap in n-grams by stage; empty: not measured, an earlier version made this"""
