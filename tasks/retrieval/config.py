"""Settings of the retrieval stage. Packages are split by name: those that measure are never trained
on. The default ones are the pinned archives of packages.toml.
"""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ostinato.infra.platform.record import Record
from ostinato.infra.platform.source_archives import SourceArchive
from ostinato.models.search_encoder.config import TowerConfig

STANDARD_LIBRARY = "standard_library"
PACKAGES_FILE = "packages.toml"


class CodePackage(SourceArchive):
    """Code of one package of the index."""

    folder: str = Field(description="folder of the archive that holds the code, such as src/flask")


Package = str | CodePackage  # a name alone is that of an installed package


def name_of(package: Package) -> str:
    """Name of a package in reports and splits."""
    return package if isinstance(package, str) else package.name


@cache
def shipped_packages(
    use: Literal["train", "validation", "held_out"],
) -> tuple[CodePackage, ...]:
    """The pinned packages that come with the stage."""
    written = tomllib.loads(files("ostinato.tasks.retrieval").joinpath(PACKAGES_FILE).read_text())
    return tuple(CodePackage.model_validate(row) for row in written[use])


class PairsConfig(Record):
    """Selection of functions that become question-answer pairs."""

    least_query_words: PositiveInt = 3
    """words a docstring's first paragraph, or a function's name, must have to be a question"""
    least_body_lines: PositiveInt = 3
    """lines a function must have, its docstring not counted, to train or to measure"""
    most_pairs: PositiveInt = Field(default=60_000, description="drawn at random beyond these")
    name_ratio: NonNegativeFloat = 0.5
    """pairs name -> body per docstring pair; they teach what short questions look like"""


class ContrastiveConfig(Record):
    """Contrastive training on code."""

    epochs: NonNegativeInt = 6
    """passes over all pairs; 0: the encoder stays untrained"""
    batch_pairs: int = Field(default=256, ge=2)
    """pairs of one step; to each question the code of the other pairs is a wrong answer"""
    hard_negatives: NonNegativeInt = 1
    """wrong answers per question that BM25 ranks high"""
    learning_rate: PositiveFloat = 2e-3
    """peak, of Adam, after the first tenth of the steps; it falls to 0"""


class RetrievalConfig(Record):
    """Settings of the search encoder."""

    train_packages: tuple[Package, ...] = Field(
        default_factory=lambda: (STANDARD_LIBRARY, *shipped_packages("train"))
    )
    """teach: pinned source archives, import names of installed packages, or standard_library, which
    is the interpreter's own"""
    validation_packages: tuple[Package, ...] = Field(
        default_factory=lambda: shipped_packages("validation")
    )
    """packages that choose the weight of the vectors beside BM25"""
    held_out_packages: tuple[Package, ...] = Field(
        default_factory=lambda: shipped_packages("held_out")
    )
    """these measure; none of their functions is ever trained on"""
    most_queries_a_package: PositiveInt = Field(
        default=250, description="questions per package of those that measure"
    )
    tower: TowerConfig = TowerConfig()
    pairs: PairsConfig = PairsConfig()
    contrastive: ContrastiveConfig = ContrastiveConfig()
    seed: NonNegativeInt = 0
    """seed of the encoder's first weights and of which pairs and wrong answers are drawn; unless given,
    the recipe's"""

    @model_validator(mode="after")
    def _disjoint(self) -> "RetrievalConfig":
        seen: dict[str, str] = {}
        for use in ("train_packages", "validation_packages", "held_out_packages"):
            for package in map(name_of, getattr(self, use)):
                if package in seen:
                    raise ValueError(f"package {package!r} is in {seen[package]} and in {use}")
                seen[package] = use
        return self


class RetrievalRequest(Record):
    """Request of the retrieval stage."""

    config: RetrievalConfig


class RankingScores(Record):
    """Rank of the right chunk, averaged over queries."""

    queries: int
    mrr: float = Field(description="mean reciprocal rank")
    recall_1: float
    recall_5: float
    recall_10: float


class RetrievalResult(Record):
    """Result of the retrieval stage: the encoder's files in `directory`."""

    directory: str
    num_pairs: int
    num_parameters: int
    dense_weight: float
    held_out: dict[str, RankingScores]
    """bm25, and dense and fused: untrained and trained"""
    by_package: dict[str, dict[str, float]] = Field(description="package -> system -> MRR")
    loss_nats: tuple[float, ...] = Field(description="mean contrastive loss of each epoch")
    seconds: float
