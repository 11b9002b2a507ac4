"""Amounts of money and a book of entries."""

from ledgerkit.book import Book, total_by_account
from ledgerkit.money import format_amount, parse_amount, split_amount

__all__ = ["Book", "format_amount", "parse_amount", "split_amount", "total_by_account"]
