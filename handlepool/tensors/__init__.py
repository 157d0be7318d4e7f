"""Describe tensors: shape, strides, type, and exchange with other libraries."""
