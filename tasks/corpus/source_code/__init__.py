"""Source files of a corpus: licences, deduplication, functions, and problem repositories."""
