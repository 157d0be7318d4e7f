"""Provide ready-made operations.

The operations are convolutions with their gradients, products, attention, activations, sums, pooling, normalisations, copies
and elementwise functions.
"""

from handlepool.ops import math
from handlepool.ops.activations import ACTIVATIONS, gelu, relu, sigmoid, swish, tanh
from handlepool.ops.attention import scaled_dot_product_attention
from handlepool.ops.combining import add, concat
from handlepool.ops.convolution import conv2d, conv2d_plan
from handlepool.ops.copies import asarray, asnumpy
from handlepool.ops.elementwise import ElementwiseFunction, elementwise, multiply
from handlepool.ops.gating import squeeze_excite
from handlepool.ops.gradients import conv2d_input_grad, conv2d_weight_grad
from handlepool.ops.moving import channel_shuffle, pad, to_channels_last, to_contiguous
from handlepool.ops.norms import batch_norm, group_norm, instance_norm, layer_norm, rms_norm, softmax
from handlepool.ops.pooling import avg_pool2d, max_pool2d, mean2d
from handlepool.ops.product import linear, matmul
from handlepool.ops.resampling import interpolate2d
from handlepool.ops.rows import conv1d
from handlepool.ops.transposed import conv_transpose1d, conv_transpose2d

__all__ = [
    "ACTIVATIONS",
    "ElementwiseFunction",
    "add",
    "asarray",
    "asnumpy",
    "avg_pool2d",
    "batch_norm",
    "channel_shuffle",
    "concat",
    "conv1d",
    "conv2d",
    "conv2d_input_grad",
    "conv2d_plan",
    "conv2d_weight_grad",
    "conv_transpose1d",
    "conv_transpose2d",
    "elementwise",
    "gelu",
    "group_norm",
    "instance_norm",
    "interpolate2d",
    "layer_norm",
    "linear",
    "math",
    "matmul",
    "max_pool2d",
    "mean2d",
    "multiply",
    "pad",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "sigmoid",
    "softmax",
    "squeeze_excite",
    "swish",
    "tanh",
    "to_channels_last",
    "to_contiguous",
]
