"""Load photographs as arrays.

Any file that Pillow reads works. The arrays are upright and opaque, with three channels from 0 to 1.
"""

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from handlepool.errors import ArgumentError

# These are the limits of ``longest_side``, in pixels.
_SMALLEST, _LARGEST = 16, 8192
_BIT_DEPTHS = (8, 12, 16)


def sample_photograph() -> Path:
    """Return the path of matplotlib's sample photograph.

    The photograph shows Grace Hopper, in 512 by 600 pixels.
    """
    from matplotlib.cbook import get_sample_data

    return Path(str(get_sample_data("grace_hopper.jpg", asfileobj=False)))


def load_photograph(path: Path, longest_side: int = 1024) -> NDArray[np.float32]:
    """Read a photograph.

    Parameters
    ----------
    path : Path
        A file that Pillow reads. If it has several frames or pages, the first is taken.
    longest_side : int
        A larger picture is reduced to this many pixels along its longer side. A smaller picture stays unchanged.

    Returns
    -------
    ndarray of float32, shape (height, width, 3)
        Red, green and blue from 0 to 1. The picture is turned upright by its EXIF data, and transparent parts lie
        over white. Grey values of more than 8 bits keep their precision.

    Raises
    ------
    ArgumentError
        For a file that is missing, unreadable or too large, and for a ``longest_side`` out of range.
    """
    if not _SMALLEST <= longest_side <= _LARGEST:
        raise ArgumentError(f"a longest side of {longest_side} pixels is out of range; pass {_SMALLEST} to {_LARGEST} as --size")
    if not path.is_file():
        raise ArgumentError(f"the image file {str(path)!r} does not exist; pass the path of a photograph")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large pictures and odd metadata. The demo needs no warning, because Pillow raises an error if it
            # cannot read the data.
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                # Pillow can decode a JPEG directly to a fraction of its size, so a large picture takes less time and memory.
                image.draft(None, (longest_side, longest_side))
                return _normalise(ImageOps.exif_transpose(image), longest_side)
    except Image.DecompressionBombError as error:
        raise ArgumentError(f"the image {str(path)!r} is too large: {error}; reduce it first") from error
    # A damaged file may raise any error in Pillow's readers.
    except Exception as error:
        what = str(error) or type(error).__name__
        raise ArgumentError(f"cannot read the image {str(path)!r}: {what}; pass a file that Pillow reads") from error


def _normalise(image: Image.Image, longest_side: int) -> NDArray[np.float32]:
    # When Pillow converts an image of one of these modes to RGB, it clips the values to 8 bits. So the values are scaled to 0
    # ... 1 first.
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_unit_range(np.asarray(image), is_float=image.mode == "F"))
        scale = 1.0
    else:
        image = _opaque_rgb(image)
        scale = 255.0
    image.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
    pixels = np.asarray(image, dtype=np.float32) / np.float32(scale)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, np.newaxis], 3, axis=2)
    return np.ascontiguousarray(np.clip(pixels, 0.0, 1.0))


def _unit_range(values: NDArray[np.generic], *, is_float: bool) -> NDArray[np.float32]:
    """Map grey values of more than 8 bits to 0 ... 1.

    A file does not say how many of its 16 or 32 bits are used: cameras store 12 bits in 16. So the largest integer decides the
    depth, which is the smallest of 8, 12 and 16 bits that holds this integer. Floats that lie in 0 ... 1 stay unchanged. All
    other values are stretched, so that the smallest value becomes 0 and the largest value 1.
    """
    grey = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(grey)
    if not finite.any():
        return np.zeros(grey.shape, dtype=np.float32)
    low, high = float(grey[finite].min()), float(grey[finite].max())
    if low >= 0.0 and is_float and high <= 1.0:
        low, high = 0.0, 1.0
    elif low >= 0.0:
        peaks = [float(2**bits - 1) for bits in _BIT_DEPTHS if high <= 2**bits - 1]
        if peaks:
            low, high = 0.0, peaks[0]
    grey = np.where(finite, grey, low)
    return ((grey - low) / ((high - low) or 1.0)).astype(np.float32)


def _opaque_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "LAB":
        to_rgb = ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")
        converted = ImageCms.applyTransform(image, to_rgb)
        # Only the in-place form of the call returns None.
        assert converted is not None
        return converted
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        # Pillow cannot convert premultiplied grey to RGBA directly, but only through "LA".
        if image.mode == "La":
            image = image.convert("LA")
        image = image.convert("RGBA")
        # In the file, transparent pixels may have any colour, which a plain conversion would show. So the picture is laid over
        # white.
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
