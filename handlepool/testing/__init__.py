"""For tests: what results are judged by."""
