"""Ready-made operations: convolutions, products and what comes behind them, gradients, activations, sums, pooling, elements."""

from handlepool.ops import math
from handlepool.ops.activations import ACTIVATIONS, gelu, relu, sigmoid, swish, tanh
from handlepool.ops.combining import add, concat
from handlepool.ops.convolution import conv2d, conv2d_plan
from handlepool.ops.copies import asarray, asnumpy
from handlepool.ops.elementwise import ElementwiseFunction, elementwise, multiply
from handlepool.ops.gradients import conv2d_input_grad, conv2d_weight_grad
from handlepool.ops.pooling import avg_pool2d, max_pool2d, mean2d
from handlepool.ops.product import linear, matmul

__all__ = [
    "ACTIVATIONS",
    "ElementwiseFunction",
    "add",
    "asarray",
    "asnumpy",
    "avg_pool2d",
    "concat",
    "conv2d",
    "conv2d_input_grad",
    "conv2d_plan",
    "conv2d_weight_grad",
    "elementwise",
    "gelu",
    "linear",
    "math",
    "matmul",
    "max_pool2d",
    "mean2d",
    "multiply",
    "relu",
    "sigmoid",
    "swish",
    "tanh",
]
