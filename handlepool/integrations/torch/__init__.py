"""Operations of torch's dispatcher: differentiable, and known to `torch.compile`. Importing this imports torch."""

from handlepool.integrations.torch.convolution import conv2d

__all__ = ["conv2d"]
