"""Conversion of a SentencePiece `tokenizer.model` to `tokenizer.json` by transformers (extra `models`)."""

from pathlib import Path

import sentencepiece
import transformers

from ostinato.infra.platform.bounded_files import read_bounded
from ostinato.infra.platform.errors import ConfigError, boundary


def convert_sentencepiece(directory: Path, model_file: Path) -> bytes:
    """`tokenizer.json` that transformers makes from the files of `directory`. Raises ConfigError
    for a file that is no SentencePiece model.
    """
    with boundary(ConfigError, f"{model_file} cannot be read; wanted a SentencePiece model"):
        sentencepiece.SentencePieceProcessor(model_proto=read_bounded(model_file))
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return tokenizer.backend_tokenizer.to_str().encode()
