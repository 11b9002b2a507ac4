"""Trains the encoder on code. The randomness of a run is its seed."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ostinato.infra.agent.search.field_scores import BODY_ONLY, score_words
from ostinato.models.search_encoder.code_words import FIELDS, CodeText, Vocabulary, split_words
from ostinato.models.search_encoder.embedder import Embedder, contrastive_loss
from ostinato.tasks.retrieval.config import ContrastiveConfig, RetrievalConfig
from ostinato.tasks.retrieval.measure import index_codes
from ostinato.tasks.retrieval.pairs import Pair

Report = Callable[[int, int, float], None]
"""Steps done, steps in all, loss in nats."""
_MINED_WORDS = 4
_MINED_BLOCK_PAIRS = 2_048
_CLIP_NORM = 1.0


def build_embedder(codes: Sequence[CodeText], config: RetrievalConfig) -> Embedder:
    """An untrained tower: random vectors weighted by rarity, which is TF-IDF in fewer dimensions."""
    counts: Counter[str] = Counter()
    for code in codes:
        counts.update({word for field in code for word in split_words(field)})
    tower = config.tower
    vocabulary = Vocabulary.from_counts(counts, tower.num_words, tower.num_buckets)
    found = np.array([counts[word] for word in vocabulary.words], dtype=np.float64)
    rarity = np.log(1 + len(codes) / found).astype(np.float32)
    return Embedder(tower, vocabulary, rarity, config.seed)


def mine_negatives(pairs: Sequence[Pair], per_query: int, seed: int) -> np.ndarray:
    """For each pair, the rows of other pairs that BM25 puts high: [pairs, per_query].

    Looked for among blocks of pairs and by the rarest words of a question only: the whole set would
    cost the square, and an easier negative is no worse a teacher.
    """
    found = np.zeros((len(pairs), per_query), dtype=np.int64)
    random = np.random.default_rng(seed)
    for first in range(0, len(pairs) - 1 if per_query else 0, _MINED_BLOCK_PAIRS):
        end = first + _MINED_BLOCK_PAIRS
        if end == len(pairs) - 1:  # a last pair alone would have no other to be told from
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
            # not always the very best: those are often other right answers
            chosen = random.choice(best, per_query, replace=len(best) < per_query)
            found[first + row] = first + chosen
    return found


def train_on_code(
    embedder: Embedder, pairs: Sequence[Pair], config: ContrastiveConfig, seed: int, report: Report
) -> list[float]:
    """InfoNCE both ways within batches, with hard negatives. Returns the mean loss of each epoch in
    nats.
    """
    if len(pairs) < 2:
        return []
    vocabulary = embedder.vocabulary
    queries = [vocabulary.bag_of_query(pair.query) for pair in pairs]
    codes = [vocabulary.bag_of_code(pair.code) for pair in pairs]
    negatives = mine_negatives(pairs, config.hard_negatives, seed)
    orders, dropped = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    steps_an_epoch = max(1, len(pairs) // config.batch_pairs)
    num_steps = config.epochs * steps_an_epoch
    optimizer, schedule = _optimizer(embedder, config.learning_rate, num_steps)
    losses: list[float] = []
    for epoch in range(config.epochs):
        total = 0.0
        order = orders.permutation(len(pairs))
        for step, rows in enumerate(np.array_split(order, steps_an_epoch)):
            hard = negatives[rows].ravel()
            # what is in the batch is a negative already, and the answer of its own question
            wanted = [*rows, *hard[~np.isin(hard, rows)]]
            loss = contrastive_loss(
                embedder.encode_queries([queries[row] for row in rows], dropped),
                embedder.encode_code([codes[row] for row in wanted], dropped),
                embedder.log_temperature.exp(),
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(embedder.parameters(), _CLIP_NORM)
            optimizer.step()
            schedule.step()
            total += loss.item()
            report(epoch * steps_an_epoch + step + 1, num_steps, loss.item())
        losses.append(total / steps_an_epoch)
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
