"""Order calls by data, from the memory that they read and write."""
