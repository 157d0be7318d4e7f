"""For tests: pools that need no GPU, a check for leaks, and what results are judged by."""
