"""What a tensor is to cuDNN: shape, strides, type, and its interchange with other libraries."""
