"""Describe a tensor to cuDNN: shape, strides, type and interchange."""
