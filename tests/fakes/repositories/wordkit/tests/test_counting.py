from wordkit import count_words, longest_word, most_common


def test_count_words():
    assert count_words("a bee sees") == 3
    assert count_words("") == 0


def test_count_words_minimum():
    assert count_words("a bee sees", 3) == 2
    assert count_words("a bee sees", minimum=4) == 1


def test_longest_word():
    assert longest_word("one three seven") == "three"
    assert longest_word("") == ""


def test_most_common():
    assert most_common("b a b c a b".split()) == ["b", "a", "c"]


def test_most_common_limit():
    assert most_common("b a b c a b d".split(), 2) == ["b", "a"]
    assert most_common([], 2) == []
