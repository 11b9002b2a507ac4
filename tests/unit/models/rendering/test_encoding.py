"""A long text is encoded as a short one is, and meanwhile other threads run."""

import threading
import time

from ostinato.models.rendering import train_tokenizer
from ostinato.models.rendering.control_texts import encode_text

TOKENIZER = train_tokenizer(["def first(items):\n    return items[0]\n"] * 3, 400)


def test_ids_do_not_depend_on_the_length():
    text = "def first(é):\n    return <b>items</b>[0] \n" * 200
    assert encode_text(TOKENIZER, text) == TOKENIZER.encode(text, add_special_tokens=False).ids
    assert encode_text(TOKENIZER, text[:50]) == TOKENIZER.encode(text[:50]).ids


def test_other_threads_run_while_a_long_text_is_encoded():
    turns, is_over = 0, False

    def count() -> None:
        nonlocal turns
        while not is_over:
            turns += 1
            time.sleep(0.0001)

    other = threading.Thread(target=count)
    other.start()
    before = turns
    encode_text(TOKENIZER, "a b " * 100_000)
    seen = turns - before
    is_over = True
    other.join()
    assert seen > 20, "the other thread waited for the text"
