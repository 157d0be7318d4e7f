"""Ready-made graph functions: convolution with bias and activation, its gradients, and activations of their own."""

from handlepool.ops.activations import ACTIVATIONS, gelu, relu, sigmoid, swish, tanh
from handlepool.ops.convolution import conv2d, conv2d_plan
from handlepool.ops.gradients import conv2d_input_grad, conv2d_weight_grad

__all__ = [
    "ACTIVATIONS",
    "conv2d",
    "conv2d_input_grad",
    "conv2d_plan",
    "conv2d_weight_grad",
    "gelu",
    "relu",
    "sigmoid",
    "swish",
    "tanh",
]
