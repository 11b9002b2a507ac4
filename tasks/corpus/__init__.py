"""Corpus stage: token shards and agent transcripts from source code."""
