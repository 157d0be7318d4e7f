"""Small helpers below every other room."""
