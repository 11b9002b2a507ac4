"""Settings of the retrieval stage. Packages are split by name into training, validation and held-out
packages. The default ones are the pinned archives of packages.toml.
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
    """Source archive of one package of the index."""

    folder: str = Field(description="folder of the archive that holds the code, such as src/flask")


Package = str | CodePackage  # a string names an installed package


def name_of(package: Package) -> str:
    """Name of a package in reports and splits."""
    return package if isinstance(package, str) else package.name


@cache
def shipped_packages(
    use: Literal["train", "validation", "held_out"],
) -> tuple[CodePackage, ...]:
    """Pinned packages of packages.toml for one use."""
    written = tomllib.loads(files("ostinato.tasks.retrieval").joinpath(PACKAGES_FILE).read_text())
    return tuple(CodePackage.model_validate(row) for row in written[use])


class PairsConfig(Record):
    """Selection of functions that become question-answer pairs."""

    least_query_words: PositiveInt = 3
    """least number of words of a docstring's first paragraph, or of a function's name, that make a question"""
    least_body_lines: PositiveInt = 3
    """least number of lines of a function without its docstring; shorter functions are not used"""
    most_pairs: PositiveInt = Field(
        default=60_000, description="largest number of pairs; from more, a random subset is drawn"
    )
    name_ratio: NonNegativeFloat = 0.5
    """pairs of a function's name and body per docstring pair, which teach short questions"""


class ContrastiveConfig(Record):
    """Contrastive training on code."""

    epochs: NonNegativeInt = 6
    """passes over all pairs; 0: the encoder stays untrained"""
    batch_pairs: int = Field(default=256, ge=2)
    """pairs per step; the code of the other pairs is a negative for each question"""
    hard_negatives: NonNegativeInt = 1
    """additional negatives per question that BM25 ranks high"""
    learning_rate: PositiveFloat = 2e-3
    """peak learning rate of Adam, reached after the first tenth of the steps; it decays to 0"""


class RetrievalConfig(Record):
    """Settings of the search encoder."""

    train_packages: tuple[Package, ...] = Field(
        default_factory=lambda: (STANDARD_LIBRARY, *shipped_packages("train"))
    )
    """packages for training: pinned source archives, import names of installed packages, or
    standard_library, which is that of the interpreter"""
    validation_packages: tuple[Package, ...] = Field(
        default_factory=lambda: shipped_packages("validation")
    )
    """packages on which the weight of the vectors relative to BM25 is chosen"""
    held_out_packages: tuple[Package, ...] = Field(
        default_factory=lambda: shipped_packages("held_out")
    )
    """packages for the final measurement; none of their functions is trained on"""
    most_queries_a_package: PositiveInt = Field(
        default=250, description="most questions per validation or held-out package"
    )
    tower: TowerConfig = TowerConfig()
    pairs: PairsConfig = PairsConfig()
    contrastive: ContrastiveConfig = ContrastiveConfig()
    seed: NonNegativeInt = 0
    """seed of the encoder's initial weights and of the draw of pairs and negatives; if not given, the
    recipe's seed"""

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
    """Metrics of the right chunk's rank, averaged over queries."""

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
    """scores by system: bm25, bm25 by field, and vectors and fused, each untrained and trained"""
    by_package: dict[str, dict[str, float]] = Field(description="package -> system -> MRR")
    loss_nats: tuple[float, ...] = Field(description="mean contrastive loss of each epoch")
    seconds: float
