"""Rows and transcripts from disk."""

from pathlib import Path

import numpy as np
import pytest

from ostinato.models.training.batch import PAD_TOKEN, RowSource, TranscriptSource, held_out_sources
from tests.fakes.corpus import counting_documents, write_corpus, write_documents, write_transcripts

DOCUMENTS = [[10, 11, 1], [20, 21, 22, 23, 1], [30, 1], [40, 41, 42, 43, 44, 45, 46, 1]]


@pytest.fixture
def rows(tmp_path: Path) -> RowSource:
    write_documents(tmp_path / "shards" / "code_train", DOCUMENTS)
    return RowSource(tmp_path / "shards" / "code_train", row_tokens=4, seed=0)


def test_rows_of_an_epoch_are_its_documents_end_to_end(rows: RowSource) -> None:
    assert rows.rows_per_epoch == 4
    stream = np.concatenate([rows.row(index) for index in range(4)]).tolist()
    wanted = sorted(DOCUMENTS)
    seen, start = [], 0
    for place, token in enumerate(stream):
        if token == 1:
            seen.append(stream[start : place + 1])
            start = place + 1
    assert all(document in wanted for document in seen)
    assert len(seen) >= 3


def test_rows_epochs_are_shuffled_differently_and_repeatably(tmp_path: Path) -> None:
    write_documents(tmp_path / "code", counting_documents(30, 40, 0))
    first, second = (
        RowSource(tmp_path / "code", 16, seed=1),
        RowSource(tmp_path / "code", 16, seed=1),
    )
    epoch = first.rows_per_epoch
    assert np.array_equal(first.row(epoch + 2), second.row(epoch + 2))
    assert not all(np.array_equal(first.row(index), first.row(epoch + index)) for index in range(4))


def test_rows_of_a_missing_or_too_short_shard_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no indexed data"):
        RowSource(tmp_path / "none", 4, seed=0)
    write_documents(tmp_path / "short", [[5, 1]])
    with pytest.raises(ValueError, match="holds 2 tokens, wanted at least 4"):
        RowSource(tmp_path / "short", 4, seed=0)


def test_transcripts_come_once_an_epoch_padded_and_masked(tmp_path: Path) -> None:
    lengths = [3, 9, 5, 30, 14, 8, 2]
    transcripts = [(list(range(2, 2 + n)), [0] + [1] * (n - 1)) for n in lengths]
    write_transcripts(tmp_path / "t.safetensors", transcripts)
    source = TranscriptSource(
        tmp_path / "t.safetensors", microbatch_tokens=32, seed=3, bucket_tokens=(8, 16, 32)
    )
    seen = []
    for index in range(len(source.cuts)):
        batch = source.microbatch(index)
        assert batch.tokens_BT.numel() == 32
        assert (batch.tokens_BT[batch.padding_BT] == PAD_TOKEN).all()
        assert not batch.loss_mask_BT[batch.padding_BT].any()
        assert not batch.loss_mask_BT[:, 0].any()
        seen += [n for n in (~batch.padding_BT).sum(1).tolist() if n]
    assert sorted(seen) == sorted(lengths)


def test_transcripts_too_long_are_counted_and_left_out(tmp_path: Path) -> None:
    write_transcripts(tmp_path / "t.safetensors", [([5] * 40, [1] * 40), ([5] * 4, [1] * 4)])
    source = TranscriptSource(
        tmp_path / "t.safetensors", microbatch_tokens=32, seed=0, bucket_tokens=(8, 32)
    )
    assert source.num_too_long == 1
    assert len(source.cuts) == 1


def test_held_out_sources_are_found_by_name(tmp_path: Path) -> None:
    assert held_out_sources(write_corpus(tmp_path)) == ["code", "library"]


@pytest.mark.parametrize("longest", [64, 128, 300, 4096])
def test_a_transcript_as_long_as_a_microbatch_fits(tmp_path: Path, longest: int) -> None:
    lengths = [2, longest // 2 + 1, longest, longest + 1]
    transcripts = [([5] * length, [1] * length) for length in lengths]
    write_transcripts(tmp_path / "t.safetensors", transcripts)
    source = TranscriptSource(tmp_path / "t.safetensors", microbatch_tokens=longest, seed=0)
    assert source.num_too_long == 1
    batches = [source.microbatch(index) for index in range(len(source.cuts))]
    assert max(int((~batch.padding_BT).sum(1).max()) for batch in batches) == longest
    assert all(batch.tokens_BT.numel() <= longest for batch in batches)
