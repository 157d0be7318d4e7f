"""Run torch's models on handlepool, and convolve with gradients.

Importing this package imports torch.
"""

from handlepool.integrations.torch.convolution import conv2d
from handlepool.integrations.torch.door import RecordedModel, recorded
from handlepool.integrations.torch.together import Together, together

__all__ = ["RecordedModel", "Together", "conv2d", "recorded", "together"]
