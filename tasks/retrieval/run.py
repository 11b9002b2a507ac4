"""Child entry of the retrieval stage: packages and traces in, a measured encoder out.

The order of work and the published files: encoder.json, encoder.safetensors, report.json. A stage
of minutes: after a kill it starts again from the code.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import TrainingError, boundary
from ostinato.infra.platform.settings import Settings
from ostinato.infra.sandbox.repository import PreparedRepository
from ostinato.models.embedder import save_embedder
from ostinato.tasks.retrieval.config import (
    Package,
    RankingScores,
    RetrievalConfig,
    RetrievalRequest,
    RetrievalResult,
    name_of,
)
from ostinato.tasks.retrieval.measure import Pool, make_pool, measure_systems, pick_dense_weight
from ostinato.tasks.retrieval.pairs import Function, make_pairs, read_package, without_copies
from ostinato.tasks.retrieval.traces import (
    ChunkedRepository,
    TraceExample,
    make_examples,
    pool_of_examples,
    read_traces,
)
from ostinato.tasks.retrieval.training import build_embedder, train_on_code, train_on_traces

ENCODER_FOLDER = "encoder"
REPORT_FILE = "report.json"
REPOSITORIES_FOLDER = "repositories"

ReadPackage = Callable[[Package], list[Function]]


def main(request: RetrievalRequest, workspace: Workspace) -> RetrievalResult:
    """Trains on code, then on traces, and measures before, between and after."""
    torch.set_num_threads(1)
    with boundary(TrainingError, "retrieval"):
        return _train(request, workspace)


def _train(request: RetrievalRequest, workspace: Workspace) -> RetrievalResult:
    started = time.monotonic()
    config = request.config
    random = np.random.default_rng(config.seed)
    archives = archives_directory(workspace.settings)
    known: dict[str, list[Function]] = {}

    def read(package: Package) -> list[Function]:
        name = name_of(package)
        if name not in known:  # what measures is asked for twice: its questions and its copies
            workspace.progress.update(0, 1, f"reading {name}")
            known[name] = read_package(package, archives)
        return known[name]

    validation = read_pools(config.validation_packages, config, random, read)
    held_out = read_pools(config.held_out_packages, config, random, read)
    functions = read_training_functions(config, read)
    pairs = make_pairs(functions, config.pairs, random)
    embedder = build_embedder([pair.code for pair in pairs], config)
    learned, judged = read_trace_examples(request)
    localisation = [pool_of_examples(judged)] if judged else []

    held_scores: dict[str, RankingScores] = {}
    local_scores: dict[str, RankingScores] = {}
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
        for name, (scores, _) in measure_systems(embedder, localisation, weight).items():
            label = name if name in ("bm25", "bm25 by field") else f"{name}, {stage}"
            local_scores[label] = scores
        return weight

    note("untrained")
    losses = train_on_code(
        embedder, pairs, config.contrastive, config.seed, _reporter(workspace, "code")
    )
    weight = note("after code")
    if learned:
        losses += train_on_traces(
            embedder, learned, pairs, config.traces, config.seed, _reporter(workspace, "traces")
        )
        weight = note("after traces")
    directory = workspace.directory / ENCODER_FOLDER
    save_embedder(embedder, directory, {"dense_weight": weight})
    result = RetrievalResult(
        directory=str(directory),
        num_pairs=len(pairs),
        num_traces=len(learned),
        num_parameters=sum(tensor.numel() for tensor in embedder.parameters()),
        dense_weight=weight,
        held_out=held_scores,
        by_package=by_package,
        localisation=local_scores,
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
) -> list[Pool]:
    """One pool a package that has something to ask."""
    most = config.most_queries_a_package
    pools = [
        make_pool(name_of(package), read(package), config.pairs, most, random)
        for package in packages
    ]
    return [pool for pool in pools if pool.queries]


def read_training_functions(config: RetrievalConfig, read: ReadPackage) -> list[Function]:
    """Functions of the packages that teach, without copies of what measures."""
    measured = [
        function
        for package in (*config.validation_packages, *config.held_out_packages)
        for function in read(package)
    ]
    taught = [function for package in config.train_packages for function in read(package)]
    return without_copies(taught, measured)


def read_trace_examples(
    request: RetrievalRequest,
) -> tuple[list[TraceExample], list[TraceExample]]:
    """Examples to learn from and examples that measure, split by repository."""
    if request.traces_directory is None or request.problems_directory is None:
        return [], []
    records = read_traces(Path(request.traces_directory))
    repositories = {
        name: read_repository(Path(request.problems_directory) / REPOSITORIES_FOLDER / name)
        for name in sorted({record.repository for record in records})
    }
    examples = make_examples(records, repositories, request.config.traces)
    held_out = set(request.config.held_out_trace_repositories)
    return (
        [example for example in examples if example.repository not in held_out],
        [example for example in examples if example.repository in held_out],
    )


def read_repository(directory: Path) -> ChunkedRepository:
    """A prepared repository of a problem set, cut into chunks."""
    prepared = PreparedRepository.load(directory)
    return ChunkedRepository.read(prepared.name, prepared.files, prepared.test_paths)


def _reporter(workspace: Workspace, phase: str) -> Callable[[int, int, float], None]:
    def report(done: int, total: int, loss: float) -> None:
        workspace.progress.update(done, total, f"{phase}: loss {loss:.3f}", loss=loss)

    return report
