"""Code search: ranking on held-out packages, and speed.

    python -m tests.benchmarks.search [--quick] [--whole] [--encoder DIRECTORY] [--minilm DIRECTORY]

Without --encoder the encoder is trained here (minutes on one core; --quick: less of it). --minilm
names the weights of the peer (tests/benchmarks/search_minilm.py says how to get them); without it
the peer is not measured.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy import stats

from ostinato.infra.agent.search.chunk_cache import ChunkCache
from ostinato.infra.agent.search.encoder import BagEncoder
from ostinato.infra.agent.search.index import CodeIndex
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.settings import load_settings
from ostinato.models.search_encoder.embedder import load_embedder
from ostinato.tasks.retrieval.config import (
    Package,
    PairsConfig,
    RetrievalConfig,
    RetrievalRequest,
    name_of,
    shipped_packages,
)
from ostinato.tasks.retrieval.measure import (
    CandidatePool,
    Scorer,
    make_scorers,
    measure,
    reciprocal_ranks,
)
from ostinato.tasks.retrieval.pairs import read_files, read_package
from ostinato.tasks.retrieval.run import archives_directory, read_pools
from ostinato.tasks.retrieval.run import main as train_encoder
from tests.benchmarks.search_minilm import MiniLm

TARGETS = {
    "fused_mrr_over_bm25": 1.0,
    "fused_mrr_over_minilm": 1.0,
    "fused_minus_bm25_low": 0.0,
    "fused_minus_minilm_low": 0.0,
    "query_p50_ms": 5.0,
    "query_edited_file_p50_ms": 50.0,
}
PEER = "all-MiniLM-L6-v2"
PEER_KEYS = {"bm25": "bm25", "bm25 by field": "bm25_by_field", PEER: "minilm"}
QUICK_PACKAGES = ("sqlalchemy", "click", "flask", "jinja2", "starlette")
Figures = dict[str, float | None]


def quick_config() -> RetrievalConfig:
    """One package that teaches and four that measure."""
    teach, ask = (
        tuple(package for package in shipped_packages(use) if package.name in QUICK_PACKAGES)
        for use in ("train", "held_out")
    )
    return RetrievalConfig(
        train_packages=teach, held_out_packages=ask, pairs=PairsConfig(most_pairs=4_000)
    )


def train(config: RetrievalConfig, directory: Path) -> Path:
    """An encoder from code alone."""
    directory.mkdir(parents=True, exist_ok=True)
    workspace = Workspace.open(directory, load_settings())
    return Path(train_encoder(RetrievalRequest(config=config), workspace).directory)


def cap_pool(pool: CandidatePool, most_codes: int, most_queries: int, seed: int) -> CandidatePool:
    """Fewer questions, and their answers among fewer other functions."""
    random = np.random.default_rng(seed)
    asked = sorted(random.permutation(len(pool.queries))[:most_queries])
    answers = [pool.answers[index] for index in asked]
    others = sorted(set(range(len(pool.codes))) - set(answers))
    missing = max(0, most_codes - len(set(answers)))
    kept = sorted({*answers, *random.permutation(others)[:missing].tolist()})
    return replace(
        pool,
        codes=tuple(pool.codes[index] for index in kept),
        queries=tuple(pool.queries[index] for index in asked),
        answers=tuple(kept.index(index) for index in answers),
    )


def rank_systems(
    encoder: Path, pools: Sequence[CandidatePool], minilm: Path | None
) -> dict[str, Scorer]:
    """Every system that ranks the same pools."""
    weight = BagEncoder(encoder).dense_weight
    scorers = make_scorers(load_embedder(encoder), pools, weight)
    if minilm is not None:
        peer = MiniLm(minilm)
        # the path and signature are in the body it reads, as they are for the others
        scored = {
            pool.name: peer.encode(pool.queries) @ peer.encode([code.body for code in pool.codes]).T
            for pool in pools
        }
        scorers[PEER] = lambda pool: scored[pool.name]
    return scorers


def compare(pools: Sequence[CandidatePool], scorers: dict[str, Scorer], peer: str) -> Figures:
    """Reciprocal rank of the fused ranking minus that of a peer, paired by question: mean and 95 %
    bootstrap interval.
    """
    name = f"fused_minus_{PEER_KEYS[peer]}"
    if peer not in scorers:
        return dict.fromkeys((f"{name}_mrr", f"{name}_low", f"{name}_high"))
    differences = reciprocal_ranks(pools, scorers["fused"]) - reciprocal_ranks(pools, scorers[peer])
    found = stats.bootstrap(
        (differences,), np.mean, n_resamples=5_000, method="percentile", rng=0, batch=100
    ).confidence_interval
    return {
        f"{name}_mrr": float(differences.mean()),
        f"{name}_low": float(found.low),
        f"{name}_high": float(found.high),
    }


def time_ms(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - started)


def measure_speed(
    encoder: Path,
    packages: Sequence[Package],
    archives: Path,
    pools: Sequence[CandidatePool],
    repeats: int,
) -> Figures:
    """Build of one index, queries, and queries after an edit, over all held-out packages."""
    files = {
        f"{name_of(package)}/{path}": text.encode()
        for package in packages
        for path, text in read_files(package, archives)
    }
    cache = ChunkCache(BagEncoder(encoder))
    build_ms = time_ms(lambda: CodeIndex(cache, files))
    index = CodeIndex(cache, files)
    queries = [query for pool in pools for query in pool.queries]
    random = np.random.default_rng(0)
    asked = [queries[i] for i in random.integers(len(queries), size=repeats)]
    cpu_started = time.process_time()
    query_ms = [time_ms(lambda query=query: index.search(query, 10)) for query in asked]
    cpu_ms = 1e3 * (time.process_time() - cpu_started) / len(asked)
    paths = [sorted(files)[i] for i in random.integers(len(files), size=repeats)]
    edited_ms = []
    cpu_started = time.process_time()
    for number, (path, query) in enumerate(zip(paths, asked, strict=True)):
        edited = files[path] + b"\n\ndef edited_%d(value):\n    return value\n" % number
        edited_ms.append(time_ms(partial(index.search, query, 10, {path: edited})))
    edited_cpu_ms = 1e3 * (time.process_time() - cpu_started) / len(paths)
    vector_bytes = 4 * BagEncoder(encoder).width
    return {
        "build_seconds": build_ms / 1e3,
        "query_p50_ms": statistics.median(query_ms),
        "query_p95_ms": float(np.quantile(query_ms, 0.95)),
        "query_mean_cpu_ms": cpu_ms,
        "query_edited_file_p50_ms": statistics.median(edited_ms),
        "query_edited_file_mean_cpu_ms": edited_cpu_ms,
        "query_edited_file_p95_ms": float(np.quantile(edited_ms, 0.95)),
        "vector_bytes_a_chunk": float(vector_bytes),
    }


def show(title: str, rows: dict[str, Sequence[str]], columns: Sequence[str]) -> None:
    """One table."""
    table = Table(title=title)
    for column in ("", *columns):
        table.add_column(column)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console().print(table)


def main() -> None:
    """Print tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small training, few repeats")
    parser.add_argument("--whole", action="store_true", help="pools as large as the packages")
    for name in ("encoder", "minilm"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = quick_config() if options.quick else RetrievalConfig()
    archives = archives_directory(load_settings())
    with tempfile.TemporaryDirectory() as scratch:
        encoder = options.encoder or train(config, Path(scratch))
        asked = config.held_out_packages
        read = partial(read_package, archives=archives)
        pools = read_pools(asked, config, np.random.default_rng(config.seed), read)
        size = (150, 30) if options.quick else (300, 100)
        if not options.whole:
            pools = [cap_pool(pool, *size, seed=0) for pool in pools]
        scorers = rank_systems(encoder, pools, options.minilm)
        systems = {name: measure(pools, scorer) for name, scorer in scorers.items()}
        differences = [compare(pools, scorers, peer) for peer in PEER_KEYS]
        speed = measure_speed(encoder, asked, archives, pools, 40 if options.quick else 200)
    mrr = {name: scores.mrr for name, (scores, _) in systems.items()}
    peer = mrr.get(PEER)
    figures: Figures = {
        "fused_mrr": mrr["fused"],
        "bm25_mrr": mrr["bm25"],
        "bm25_by_field_mrr": mrr["bm25 by field"],
        "vectors_mrr": mrr["vectors"],
        "minilm_mrr": peer,
        "fused_mrr_over_bm25": mrr["fused"] / mrr["bm25"],
        "fused_mrr_over_minilm": None if peer is None else mrr["fused"] / peer,
        "questions": float(sum(len(pool.queries) for pool in pools)),
        **{name: value for part in differences for name, value in part.items()},
        **speed,
    }
    show(
        "ranking, held-out packages",
        {
            name: [
                f"{value:.3f}"
                for value in (
                    scores.mrr,
                    scores.recall_1,
                    scores.recall_10,
                    *(by_package[pool.name] for pool in pools),
                )
            ]
            for name, (scores, by_package) in systems.items()
        },
        ("MRR", "R@1", "R@10", *(pool.name for pool in pools)),
    )
    show(
        "figures",
        {
            name: ["not measured" if value is None else f"{value:.3f}"]
            for name, value in figures.items()
        },
        ("value",),
    )
    missing = [name for name, value in figures.items() if value is None]
    met = all(
        value is not None and (value < target if name.endswith("_ms") else value > target)
        for name, target in TARGETS.items()
        for value in (figures[name],)
    )
    answer = {"name": "search", "figures": figures, "targets": TARGETS, "met": met}
    print(json.dumps(answer | {"not_measured": missing}))


if __name__ == "__main__":
    main()
