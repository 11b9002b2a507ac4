"""Transcripts of repairs that a scripted agent makes."""
