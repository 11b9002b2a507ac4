import pytest

from ledgerkit import Book, total_by_account


@pytest.fixture
def book():
    book = Book()
    book.add("rent", -50000)
    book.add("pay", 200005)
    return book


def test_balance(book):
    assert book.balance == 150005


def test_set_balance(book):
    book.balance = 100
    assert book.balance == 100


def test_lines(book):
    assert list(book.lines()) == ["rent: E -500.00", "pay: E 2000.05"]


def test_total_by_account():
    assert total_by_account([("a", 1), ("b", 2), ("a", 3)]) == {"a": 4, "b": 2}


def test_total_of_nothing():
    assert total_by_account([]) == {}
