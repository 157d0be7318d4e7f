"""Small helpers that every other room of the package may import."""
