"""Token documents on disk: Megatron indexed data, and demonstrations as one safetensors file."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from safetensors.numpy import save_file

from ostinato.tasks.corpus.config import ShardStatistics
from ostinato.tasks.corpus.repairs.transcripts import Document

DEMONSTRATIONS_FILE = "demonstrations.safetensors"


def write_shard(directory: Path, name: str, documents: Iterable[Sequence[int]]) -> ShardStatistics:
    """Writes NAME.bin and NAME.idx (int32). One document each."""
    directory.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(directory / f"{name}.bin"), dtype=np.int32)
    num_documents = num_tokens = 0
    for token_ids in documents:
        builder.add_document(torch.tensor(token_ids, dtype=torch.int32), [len(token_ids)])
        num_documents += 1
        num_tokens += len(token_ids)
    builder.finalize(str(directory / f"{name}.idx"))
    return ShardStatistics(name=name, documents=num_documents, tokens=num_tokens)


def write_demonstrations(directory: Path, documents: Sequence[Document]) -> None:
    """Writes all demonstrations end to end: `offsets[i]:offsets[i + 1]` is document i."""
    lengths = [len(document.token_ids) for document in documents]
    token_ids = [token for document in documents for token in document.token_ids]
    loss_mask = [value for document in documents for value in document.loss_mask]
    arrays = {
        "token_ids": np.asarray(token_ids, dtype=np.int32),
        "loss_mask": np.asarray(loss_mask, dtype=np.uint8),
        "offsets": np.asarray([0, *np.cumsum(lengths)], dtype=np.int64),
    }
    temporary = directory / f".{DEMONSTRATIONS_FILE}"
    save_file(arrays, temporary)
    temporary.replace(directory / DEMONSTRATIONS_FILE)
