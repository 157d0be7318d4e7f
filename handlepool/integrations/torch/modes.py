"""Read torch's modes that change the kernels of a model."""

from typing import Any

import torch

_c: Any = torch._C


def _flag(name: str) -> Any:
    # If this version of torch does not have the setting, the setting counts as switched off.
    return getattr(_c, name, lambda: False)


_FLAGS = (
    torch.is_inference_mode_enabled,
    torch.is_grad_enabled,
    _flag("_get_cudnn_enabled"),
    _flag("_get_cudnn_benchmark"),
    _flag("_get_cudnn_deterministic"),
    _flag("_get_deterministic_algorithms"),
    _flag("_get_cublas_allow_fp16_reduced_precision_reduction"),
    _flag("_get_cublas_allow_bf16_reduced_precision_reduction"),
    _flag("_get_flash_sdp_enabled"),
    _flag("_get_mem_efficient_sdp_enabled"),
    _flag("_get_math_sdp_enabled"),
    _flag("_get_cudnn_sdp_enabled"),
)


def tf32() -> tuple[bool, bool]:
    """Return whether matrix products may use TF32, and whether convolutions may."""
    try:
        return _c._get_cublas_allow_tf32(), _c._get_cudnn_allow_tf32()
    except RuntimeError:
        # Once user code has set torch's newer settings of precision, the older getters raise.
        read = _c._get_fp32_precision_getter
        return read("cuda", "matmul") == "tf32", read("cuda", "conv") == "tf32"


def deterministic() -> bool:
    """Return whether convolutions have to be deterministic."""
    return bool(_c._get_cudnn_deterministic() or _c._get_deterministic_algorithms())


def modes(kind: str) -> str | int:
    """Return torch's settings that decide kernels, as one value.

    The value is a part of a program's key. With equal values, equal arguments get equal kernels. Of autocast, only the mode for
    the device type ``kind`` counts.
    """
    bits = 0
    for flag in _FLAGS:
        bits = bits << 1 | bool(flag())
    for allowed in tf32():
        bits = bits << 1 | allowed
    if kind == "cuda":
        bits = bits << 8 | torch.cuda.current_device()
    if kind not in ("cuda", "cpu"):
        return bits
    if torch.is_autocast_enabled(kind):
        return f"{bits} {torch.get_autocast_dtype(kind)}"
    return bits
