"""Recorded programs: a function's work on streams, replayed with one launch."""
