"""The pool: handles and scratch memory for each thread, device and stream."""
