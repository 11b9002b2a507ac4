"""Source code to token shards and agent transcripts."""
