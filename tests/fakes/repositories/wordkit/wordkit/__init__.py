"""Words in lines of text."""

from wordkit.counting import count_words, longest_word, most_common
from wordkit.shaping import make_slug, pad_center, split_pairs, wrap_words

__all__ = [
    "count_words", "longest_word", "make_slug", "most_common", "pad_center", "split_pairs", "wrap_words",
]  # fmt: skip
