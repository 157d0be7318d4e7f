"""Other libraries' code on handlepool: each module stands on the public names, and is imported only when asked for."""
