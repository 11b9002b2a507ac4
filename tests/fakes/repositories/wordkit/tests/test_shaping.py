import unittest

import pytest
from wordkit import make_slug, pad_center, split_pairs, wrap_words


@pytest.mark.parametrize("text, slug", [("Hello, World!", "hello-world"), ("  a  b ", "a-b"), ("", "")])
def test_make_slug(text, slug):
    assert make_slug(text) == slug


def test_make_slug_separator():
    assert make_slug("Hello, World!", "_") == "hello_world"


class WrapTests(unittest.TestCase):
    def test_wrap_words(self):
        self.assertEqual(wrap_words("aa bb cc", 5), ["aa bb", "cc"])

    def test_wrap_long_word(self):
        for width in (1, 3):
            with self.subTest(width=width):
                self.assertEqual(wrap_words("aaaa b", width), ["aaaa", "b"])

    def test_wrap_nothing(self):
        self.assertEqual(wrap_words("", 5), [])


def test_pad_center():
    assert pad_center("ab", 5) == " ab  "
    assert pad_center("ab", 1) == "ab"
    assert pad_center("ab", 4, "*") == "*ab*"


def test_split_pairs():
    assert split_pairs("a=1 b c=2") == {"a": "1", "c": "2"}


def test_split_pairs_needs_text():
    with pytest.raises(AttributeError):
        split_pairs(None)
