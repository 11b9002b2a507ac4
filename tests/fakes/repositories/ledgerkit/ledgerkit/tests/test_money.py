import pytest

from ledgerkit import format_amount, parse_amount, split_amount


def test_format_amount():
    assert format_amount(1205) == "E 12.05"
    assert format_amount(-5, "dollar") == "D -0.05"


def test_format_refuses_fractions():
    with pytest.raises(TypeError):
        format_amount(1.5)


def test_parse_amount():
    assert parse_amount("E 12.05") == 1205
    assert parse_amount("D -0.05") == -5


@pytest.mark.parametrize("cents", [0, 7, -1205])
def test_round_trip(cents):
    assert parse_amount(format_amount(cents)) == cents


def test_split_amount():
    assert split_amount(10, 3) == [4, 3, 3]
    assert sum(split_amount(101, 7)) == 101
