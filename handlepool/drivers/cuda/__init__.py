"""NVIDIA GPUs: the one place that imports CuPy and CUDA's bindings."""
