"""A tiny corpus on disk in the layout of the corpus stage, learnable within a few steps."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from safetensors.numpy import save_file

from ostinato.models.rendering import Renderer, train_tokenizer

END_OF_TEXT = 1


def write_documents(path_prefix: Path, documents: Sequence[Sequence[int]]) -> None:
    """Writes PREFIX.bin and PREFIX.idx."""
    path_prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{path_prefix}.bin", dtype=np.int32)
    for document in documents:
        builder.add_document(torch.tensor(document, dtype=torch.int32), [len(document)])
    builder.finalize(f"{path_prefix}.idx")


def write_transcripts(
    path: Path, transcripts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> None:
    """Writes (token ids, loss mask) pairs end to end."""
    lengths = [len(token_ids) for token_ids, _ in transcripts]
    arrays = {
        "token_ids": np.array(
            [token for token_ids, _ in transcripts for token in token_ids], dtype=np.int32
        ),
        "loss_mask": np.array([value for _, mask in transcripts for value in mask], dtype=np.uint8),
        "offsets": np.array([0, *np.cumsum(lengths)], dtype=np.int64),
    }
    save_file(arrays, path)


def counting_documents(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Documents that count upwards from a drawn start: the next token is certain once the pattern
    is known.
    """
    generator = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        start, length = int(generator.integers(2, vocab_size)), int(generator.integers(5, 40))
        body = [2 + (start + place) % (vocab_size - 2) for place in range(length)]
        documents.append([*body, END_OF_TEXT])
    return documents


def write_corpus(directory: Path, vocab_size: int = 40) -> Path:
    """Writes shards code and library with held-out parts, and demonstrations masked on their second
    half.
    """
    for seed, name in enumerate(("code", "library")):
        write_documents(
            directory / "shards" / f"{name}_train", counting_documents(60, vocab_size, seed)
        )
        write_documents(
            directory / "shards" / f"{name}_heldout", counting_documents(12, vocab_size, 100 + seed)
        )
    transcripts = [
        (document, [int(place >= len(document) // 2) for place in range(len(document))])
        for document in counting_documents(30, vocab_size, 7)
    ]
    write_transcripts(directory / "demonstrations.safetensors", transcripts)
    Renderer(train_tokenizer(["def add(a, b): return a"], vocab_size=400)).save(directory)
    return directory
