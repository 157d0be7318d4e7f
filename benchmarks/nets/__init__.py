"""Networks as a user would write them: plain functions of parameters and images, on the library's operations.

Each takes ``ops``, where its operations come from: the library's by default; those of a fork (`forked`), so that each call is a
branch; NumPy's in float64 (`Reference`) or torch's, for comparison. Weights are random, with batch norm folded into them.
"""

from nets.ensemble import ensemble
from nets.googlenet import googlenet, googlenet_stacked
from nets.inception import inception_v3
from nets.parameters import Parameters
from nets.resnet18 import resnet18
from nets.resnet50 import resnet50
from nets.squeezenet import squeezenet
from nets.unet import unet

NETWORKS = {
    "googlenet": googlenet,
    "squeezenet1_1": squeezenet,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "ensemble": ensemble,
    "unet": unet,
    "inception_v3": inception_v3,
    "googlenet_stacked": googlenet_stacked,
}

__all__ = [
    "NETWORKS",
    "Parameters",
    "ensemble",
    "googlenet",
    "googlenet_stacked",
    "inception_v3",
    "resnet18",
    "resnet50",
    "squeezenet",
    "unet",
]
