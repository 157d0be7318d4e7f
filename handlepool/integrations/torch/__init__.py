"""Provide differentiable operations for torch's dispatcher.

`torch.compile` knows the operations. Importing this package imports torch.
"""

from handlepool.integrations.torch.convolution import conv2d

__all__ = ["conv2d"]
