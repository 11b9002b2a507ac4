"""Words and fields of code."""

from ostinato.models.search_encoder.code_words import Vocabulary, describe_code, split_words


def test_identifiers_fall_into_parts_whatever_their_style() -> None:
    words = split_words("parseHTTPDoc first_items x2")
    assert words == ["parse", "http", "doc", "first", "item", "x", "2"]


def test_plurals_fold_but_words_that_only_look_so_do_not() -> None:
    words = split_words("entries class status has values")
    assert words == ["entry", "class", "status", "has", "value"]


def test_fields_hold_the_name_and_the_signature() -> None:
    text = "@cache\ndef first(\n    a,\n):\n    return a"
    described = describe_code("pkg/a.py", "Box.first", text)

    assert described == (
        "pkg/a.py Box",
        "first",
        "@cache\ndef first(\n    a,\n):",
        f"pkg/a.py Box.first\n{text}",
    )
    assert describe_code("a.py", "", "x = 1").head == ""


def test_an_unknown_word_meets_itself_and_known_words_have_ids_of_their_own() -> None:
    vocabulary = Vocabulary(["merge", "split"], num_buckets=1000)
    bag = vocabulary.bag_of_query("merge zebra merge split")

    assert bag.ids.tolist() == [0, 1, vocabulary.id_of("zebra")]
    assert bag.counts[:, -1].tolist() == [2.0, 1.0, 1.0]
    assert vocabulary.id_of("zebra") >= vocabulary.num_known
