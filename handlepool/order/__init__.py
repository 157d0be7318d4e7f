"""Order by data: the memory that calls read and write, and the calls that wait for others."""
