"""Counting words."""


def count_words(text, minimum=1):
    """Number of words with at least `minimum` letters."""
    total = 0
    for word in text.split():
        if len(word) >= minimum:
            total += 1
    return total


def longest_word(text):
    """The first of the longest words."""
    best = ""
    for word in text.split():
        if len(word) > len(best):
            best = word
    return best


def most_common(words, limit=3):
    """Words by falling count, then by alphabet."""
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return ordered[:limit]
