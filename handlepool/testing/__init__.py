"""Provide test helpers: pools without a GPU, leak checks, reference results."""
