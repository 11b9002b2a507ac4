"""Changing the shape of text."""


def make_slug(text, separator="-"):
    """Lower case letters and digits, joined."""
    kept = [letter if letter.isalnum() else " " for letter in text.lower()]
    return separator.join("".join(kept).split())


def wrap_words(text, width):
    """Lines of at most `width` characters; a longer word has its own line."""
    lines = []
    current = ""
    for word in text.split():
        if current and len(current) + 1 + len(word) > width:
            lines.append(current)
            current = word
        else:
            current = f"{current} {word}" if current else word
    if current:
        lines.append(current)
    return lines


def pad_center(text, width, fill=" "):
    """Text in the middle; an odd rest goes to the right."""
    missing = max(0, width - len(text))
    left = missing // 2
    return fill * left + text + fill * (missing - left)


def split_pairs(text, separator="="):
    """A mapping of `key=value` words; words without the separator are left out."""
    pairs = {}
    for word in text.split():
        key, found, value = word.partition(separator)
        if found:
            pairs[key] = value
    return pairs
