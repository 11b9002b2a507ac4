"""Child entry of the retrieval stage: packages in, a measured encoder out.

The stage takes minutes. After a kill it starts again from the beginning.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ostinato.infra.agent.search.field_scores import BODY_ONLY, score_words
from ostinato.infra.platform.cluster.workspace import Workspace
from ostinato.infra.platform.errors import TrainingError, boundary
from ostinato.models.search_encoder.code_words import FIELDS, CodeText, Vocabulary, split_words
from ostinato.models.search_encoder.embedder import Embedder, contrastive_loss, save_embedder
from ostinato.tasks.retrieval.config import (
    ContrastiveConfig,
    Package,
    RankingScores,
    RetrievalConfig,
    RetrievalRequest,
    RetrievalResult,
    name_of,
)
from ostinato.tasks.retrieval.measure import (
    CandidatePool,
    index_codes,
    make_pool,
    measure_systems,
    pick_dense_weight,
)
from ostinato.tasks.retrieval.pairs import (
    IndexedFunction,
    Pair,
    make_pairs,
    read_package,
    remove_duplicates,
)

Report = Callable[[int, int, float], None]
"""Function of steps done, total steps and loss in nats."""
_MINED_WORDS = 4
_MINED_BLOCK_PAIRS = 2_048
_CLIP_NORM = 1.0


def build_embedder(codes: Sequence[CodeText], config: RetrievalConfig) -> Embedder:
    """An untrained encoder: random vectors weighted by rarity, which is TF-IDF in fewer dimensions."""
    counts: Counter[str] = Counter()
    for code in codes:
        counts.update({word for field in code for word in split_words(field)})
    tower = config.tower
    vocabulary = Vocabulary.from_counts(counts, tower.num_words, tower.num_buckets)
    found = np.array([counts[word] for word in vocabulary.words], dtype=np.float64)
    rarity = np.log(1 + len(codes) / found).astype(np.float32)
    return Embedder(tower, vocabulary, rarity, config.seed)


def mine_negatives(pairs: Sequence[Pair], per_query: int, seed: int) -> np.ndarray:
    """For each pair, the rows of other pairs that BM25 ranks high: [pairs, per_query].

    The search covers only a block of pairs and the rarest words of a question, because the cost of the
    whole set is quadratic and easier negatives teach as well.
    """
    found = np.zeros((len(pairs), per_query), dtype=np.int64)
    random = np.random.default_rng(seed)
    for first in range(0, len(pairs) - 1 if per_query else 0, _MINED_BLOCK_PAIRS):
        end = first + _MINED_BLOCK_PAIRS
        if end == len(pairs) - 1:  # a block with the last pair alone would hold no negatives
            end += 1
        block = pairs[first:end]
        segment = index_codes([pair.code for pair in block])
        documents = segment.statistics.documents[FIELDS.index("body")]
        for row, pair in enumerate(block):
            known = [word for word in set(split_words(pair.query)) if word in documents]
            rarest = sorted(known, key=lambda word: (documents[word], word))[:_MINED_WORDS]
            scores = score_words(segment, rarest, [segment.statistics], rules=BODY_ONLY)
            scores[row] = -1.0
            best = np.argsort(-scores)[: min(2 * per_query, len(block) - 1)]
            # not always the best ones, which are often right answers too
            chosen = random.choice(best, per_query, replace=len(best) < per_query)
            found[first + row] = first + chosen
    return found


def train_on_code(
    embedder: Embedder, pairs: Sequence[Pair], config: ContrastiveConfig, seed: int, report: Report
) -> list[float]:
    """Trains with InfoNCE in both directions within batches, and with hard negatives. Returns the mean
    loss of each epoch in nats.
    """
    if len(pairs) < 2:
        return []
    vocabulary = embedder.vocabulary
    queries = [vocabulary.bag_of_query(pair.query) for pair in pairs]
    codes = [vocabulary.bag_of_code(pair.code) for pair in pairs]
    negatives = mine_negatives(pairs, config.hard_negatives, seed)
    orders, dropped = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    steps_per_epoch = max(1, len(pairs) // config.batch_pairs)
    num_steps = config.epochs * steps_per_epoch
    optimizer, schedule = _optimizer(embedder, config.learning_rate, num_steps)
    losses: list[float] = []
    for epoch in range(config.epochs):
        total = 0.0
        order = orders.permutation(len(pairs))
        for step, rows in enumerate(np.array_split(order, steps_per_epoch)):
            hard = negatives[rows].ravel()
            # the code of the batch is there already, as answers and negatives
            code_rows = [*rows, *hard[~np.isin(hard, rows)]]
            loss = contrastive_loss(
                embedder.encode_queries([queries[row] for row in rows], dropped),
                embedder.encode_code([codes[row] for row in code_rows], dropped),
                embedder.log_temperature.exp(),
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(embedder.parameters(), _CLIP_NORM)
            optimizer.step()
            schedule.step()
            total += loss.item()
            report(epoch * steps_per_epoch + step + 1, num_steps, loss.item())
        losses.append(total / steps_per_epoch)
    return losses


def _optimizer(
    embedder: Embedder, learning_rate: float, num_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.Adam(embedder.parameters(), lr=learning_rate, fused=True)
    num_steps = max(1, num_steps)
    num_warm = max(1, num_steps // 10)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / num_warm) * (1 + math.cos(math.pi * step / num_steps)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return optimizer, schedule


ENCODER_FOLDER = "encoder"
REPORT_FILE = "report.json"

ReadPackage = Callable[[Package], list[IndexedFunction]]


def main(request: RetrievalRequest, workspace: Workspace) -> RetrievalResult:
    """Trains an encoder on code, and measures it before and after."""
    torch.set_num_threads(1)
    with boundary(TrainingError, "retrieval"):
        return _train(request, workspace)


def _train(request: RetrievalRequest, workspace: Workspace) -> RetrievalResult:
    started = time.monotonic()
    config = request.config
    random = np.random.default_rng(config.seed)
    archives = workspace.settings.cache_directory / "archives"  # shared with the problem stage
    known: dict[str, list[IndexedFunction]] = {}

    def read(package: Package) -> list[IndexedFunction]:
        name = name_of(package)
        # validation and held-out packages are used twice: for questions, and to remove duplicates
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

    def measure_stage(stage: str) -> float:
        weight = pick_dense_weight(embedder, validation)
        for name, (scores, by_pool) in measure_systems(embedder, held_out, weight).items():
            label = name if name in ("bm25", "bm25 by field") else f"{name}, {stage}"
            held_scores[label] = scores
            for pool, mrr in by_pool.items():
                by_package[pool][label] = mrr
        return weight

    measure_stage("untrained")
    losses = train_on_code(
        embedder,
        pairs,
        config.contrastive,
        config.seed,
        lambda done, total, loss: workspace.progress.update(
            done, total, f"loss {loss:.3f}", loss=loss
        ),
    )
    weight = measure_stage("trained")
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


def read_pools(
    packages: Sequence[Package],
    config: RetrievalConfig,
    random: np.random.Generator,
    read: ReadPackage,
) -> list[CandidatePool]:
    """One pool for each package that has questions."""
    most = config.most_queries_a_package
    pools = [
        make_pool(name_of(package), read(package), config.pairs, most, random)
        for package in packages
    ]
    return [pool for pool in pools if pool.queries]


def read_training_functions(config: RetrievalConfig, read: ReadPackage) -> list[IndexedFunction]:
    """Functions of the training packages, without duplicates of validation and held-out functions."""
    measured = [
        function
        for package in (*config.validation_packages, *config.held_out_packages)
        for function in read(package)
    ]
    functions = [function for package in config.train_packages for function in read(package)]
    return remove_duplicates(functions, measured)
