"""Run torch's models on handlepool, and convolve with gradients.

Importing this package imports torch.
"""

from handlepool.integrations.torch.convolution import conv2d
from handlepool.integrations.torch.door import RecordedModel, recorded
from handlepool.integrations.torch.report import ProgramReport, Report, report
from handlepool.integrations.torch.together import Together, together
from handlepool.integrations.torch.width import Width, width

__all__ = ["ProgramReport", "RecordedModel", "Report", "Together", "Width", "conv2d", "recorded", "report", "together", "width"]
