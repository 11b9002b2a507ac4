"""Trains the byte-level BPE tokenizer.

Pre-tokenisation suits Python: a newline includes the next indent, runs of two or more spaces stay
whole, words may have one leading space and underscores, and each digit is separate.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from ostinato.models.rendering.vocabulary import SPECIAL_TOKENS

PRETOKEN_PATTERN = (
    r"\n *"  # a line end with the next line's indent
    r"| {2,}"
    r"| ?_*\p{L}+"  # first_true -> first, _true
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with `vocab_size` tokens, special tokens included."""
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size is {vocab_size}, wanted at least {smallest} (specials and bytes)"
        )
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
