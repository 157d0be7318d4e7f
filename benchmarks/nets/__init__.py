"""Networks as a user would write them: plain functions of parameters and images, on the library's operations.

Each takes ``ops``, where its operations come from: the library's by default; those of a fork (`forked`), so that each call is a
branch; NumPy's in float64 (`Reference`) or torch's, for comparison. Weights are random, with batch norm folded into them.
"""

from nets.convnext import convnext_tiny
from nets.efficientnet import efficientnet_b0
from nets.ensemble import ensemble
from nets.googlenet import googlenet, googlenet_stacked
from nets.inception import inception_v3
from nets.mobilenet import mobilenet_v3_large
from nets.parameters import Parameters
from nets.resnet18 import resnet18
from nets.resnet50 import resnet50
from nets.shufflenet import shufflenet_v2
from nets.squeezenet import squeezenet
from nets.unet import unet, unet_bilinear
from nets.vit import vit_b_16

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
MODERN = {
    "efficientnet_b0": efficientnet_b0,
    "mobilenet_v3_large": mobilenet_v3_large,
    "convnext_tiny": convnext_tiny,
    "shufflenet_v2": shufflenet_v2,
    "vit_b_16": vit_b_16,
    "unet_bilinear": unet_bilinear,
}
"""Networks with the operations of recent ones, which JAX's kind does not have."""

__all__ = [
    "MODERN",
    "NETWORKS",
    "Parameters",
    "convnext_tiny",
    "efficientnet_b0",
    "ensemble",
    "googlenet",
    "googlenet_stacked",
    "inception_v3",
    "mobilenet_v3_large",
    "resnet18",
    "resnet50",
    "shufflenet_v2",
    "squeezenet",
    "unet",
    "unet_bilinear",
    "vit_b_16",
]
