"""Turn Python functions into cuDNN graphs, and compile and launch these."""
