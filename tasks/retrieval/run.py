"""Child entry of the retrieval stage: packages in, a measured encoder out.

A stage of minutes: after a kill it starts again from the code.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import TrainingError, boundary
from ostinato.infra.platform.settings import Settings
from ostinato.models.search_encoder.embedder import save_embedder
from ostinato.tasks.retrieval.config import (
    Package,
    RankingScores,
    RetrievalConfig,
    RetrievalRequest,
    RetrievalResult,
    name_of,
)
from ostinato.tasks.retrieval.measure import (
    CandidatePool,
    make_pool,
    measure_systems,
    pick_dense_weight,
)
from ostinato.tasks.retrieval.pairs import IndexedFunction, make_pairs, read_package, without_copies
from ostinato.tasks.retrieval.training import build_embedder, train_on_code

ENCODER_FOLDER = "encoder"
REPORT_FILE = "report.json"

ReadPackage = Callable[[Package], list[IndexedFunction]]


def main(request: RetrievalRequest, workspace: Workspace) -> RetrievalResult:
    """Trains on code, and measures before and after."""
    torch.set_num_threads(1)
    with boundary(TrainingError, "retrieval"):
        return _train(request, workspace)


def _train(request: RetrievalRequest, workspace: Workspace) -> RetrievalResult:
    started = time.monotonic()
    config = request.config
    random = np.random.default_rng(config.seed)
    archives = archives_directory(workspace.settings)
    known: dict[str, list[IndexedFunction]] = {}

    def read(package: Package) -> list[IndexedFunction]:
        name = name_of(package)
        # packages that measure are read twice: for questions and to leave out copies
        if name not in known:
            workspace.progress.update(0, 1, f"reading {name}")
            known[name] = read_package(package, archives)
        return known[name]

    validation = read_pools(config.validation_packages, config, random, read)
    held_out = read_pools(config.held_out_packages, config, random, read)
    functions = read_training_functions(config, read)
    pairs = make_pairs(functions, config.pairs, random)
    embedder = build_embedder([pair.code for pair in pairs], config)

    held_scores: dict[str, RankingScores] = {}
    by_package: dict[str, dict[str, float]] = {
        name_of(package): {} for package in config.held_out_packages
    }

    def note(stage: str) -> float:
        weight = pick_dense_weight(embedder, validation)
        for name, (scores, by_pool) in measure_systems(embedder, held_out, weight).items():
            label = name if name in ("bm25", "bm25 by field") else f"{name}, {stage}"
            held_scores[label] = scores
            for pool, mrr in by_pool.items():
                by_package[pool][label] = mrr
        return weight

    note("untrained")
    losses = train_on_code(
        embedder,
        pairs,
        config.contrastive,
        config.seed,
        lambda done, total, loss: workspace.progress.update(
            done, total, f"loss {loss:.3f}", loss=loss
        ),
    )
    weight = note("trained")
    directory = workspace.directory / ENCODER_FOLDER
    save_embedder(embedder, directory, {"dense_weight": weight})
    result = RetrievalResult(
        directory=str(directory),
        num_pairs=len(pairs),
        num_parameters=sum(tensor.numel() for tensor in embedder.parameters()),
        dense_weight=weight,
        held_out=held_scores,
        by_package=by_package,
        loss_nats=tuple(losses),
        seconds=time.monotonic() - started,
    )
    (directory / REPORT_FILE).write_text(result.model_dump_json(indent=1))
    return result


def archives_directory(settings: Settings) -> Path:
    """Directory of source archives, those of the problem stage among them."""
    return settings.cache_directory / "archives"


def read_pools(
    packages: Sequence[Package],
    config: RetrievalConfig,
    random: np.random.Generator,
    read: ReadPackage,
) -> list[CandidatePool]:
    """One pool per package that has questions."""
    most = config.most_queries_a_package
    pools = [
        make_pool(name_of(package), read(package), config.pairs, most, random)
        for package in packages
    ]
    return [pool for pool in pools if pool.queries]


def read_training_functions(config: RetrievalConfig, read: ReadPackage) -> list[IndexedFunction]:
    """Functions of the packages that teach, without copies of what measures."""
    measured = [
        function
        for package in (*config.validation_packages, *config.held_out_packages)
        for function in read(package)
    ]
    taught = [function for package in config.train_packages for function in read(package)]
    return without_copies(taught, measured)
