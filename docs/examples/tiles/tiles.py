"""A five-fold ensemble over tiles of a large image: all folds of a tile are one program, and `spread` takes every GPU."""

import sys

import numpy as np

import handlepool

FOLDS, TILE, MARGIN, SHAPES = 5, 64, 8, ((12, 1, 7, 7), (12, 12, 3, 3), (12, 12, 2, 2))
INSIDE = ..., slice(MARGIN, -MARGIN), slice(MARGIN, -MARGIN)


def features(x, first, below, up):
    """Return features of each pixel: of its own size, and of half the size."""
    fine = handlepool.conv2d(x, first, padding=3, activation="relu")
    coarse = handlepool.conv2d(handlepool.max_pool2d(fine, 2), below, padding=1, activation="relu")
    return handlepool.concat([x, fine, handlepool.conv_transpose2d(coarse, up, stride=2, activation="relu")], 1)


def ensemble(x, folds):
    """Return the probability of each pixel by each fold; `spread` records this function."""
    return handlepool.concat([handlepool.conv2d(features(x, *t), w, bias=b, activation="sigmoid") for *t, w, b in folds], 1)


def cut(image):
    """Return the tiles of an image with their margins, row by row."""
    padded, side = np.pad(image, MARGIN, mode="reflect"), TILE + 2 * MARGIN
    starts = [(y, x) for y in range(0, image.shape[0], TILE) for x in range(0, image.shape[1], TILE)]
    return [np.ascontiguousarray(padded[None, None, y : y + side, x : x + side]) for y, x in starts]


def segment(image, folds):
    """Return each fold's probabilities of a whole image, whose extents are multiples of a tile's."""
    tiles = np.stack([tile[0][INSIDE] for tile in handlepool.spread(ensemble, cut(image), shared=(folds,), to="host")])
    return tiles.reshape(-1, image.shape[1] // TILE, FOLDS, TILE, TILE).transpose(2, 0, 3, 1, 4).reshape(FOLDS, *image.shape)


def fitted(image, mask, rng):
    """Return five folds: U-Nets with random filters, whose last layer is fitted without a fifth of the labelled tiles."""
    tiles, folds, labels = cut(image), [], np.stack(cut(mask))[INSIDE]
    for fold in range(FOLDS):
        trunk = [rng.uniform(-0.5, 1, shape).astype(np.float32) * np.float32(2 / np.prod(shape[1:])) for shape in SHAPES]
        chosen = np.arange(len(tiles)) % FOLDS != fold
        found = np.stack([each[INSIDE] for each in handlepool.spread(features, tiles, shared=trunk, to="host")])[chosen, 0]
        rows = np.moveaxis(found, 1, -1).reshape(-1, found.shape[1])
        *w, b = np.linalg.lstsq(np.c_[rows, np.ones(len(rows))], 8.0 * labels[chosen].ravel() - 4, rcond=None)[0]
        folds.append([*trunk, np.array(w, np.float32).reshape(1, -1, 1, 1), np.array([b], np.float32)])
    return folds


def scene(rng, side):
    """Return an image of noisy discs, and their mask."""
    (y, x), mask = np.mgrid[:side, :side], np.zeros((side, side), bool)
    for cy, cx, r in rng.uniform((20, 20, 6), (side - 20, side - 20, 19), (side * side // 3000, 3)):
        box = np.s_[int(cy - r) : int(cy + r) + 2, int(cx - r) : int(cx + r) + 2]
        mask[box] |= (y[box] - cy) ** 2 + (x[box] - cx) ** 2 < r**2
    return (mask + 0.3 * x / side + 0.6 * rng.standard_normal((side, side))).astype(np.float32), mask


def draw(image, mask, found, file, where):
    """Draw the image, the mean of the folds, and their disagreement."""
    from matplotlib import pyplot

    dice = [2 * np.sum((each > 0.5) & mask) / np.sum((each > 0.5) * 1 + mask) for each in (found.mean(0), *found)]
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4.5), dpi=150, layout="constrained")
    names, values = (f"image of {len(cut(image))} tiles", "mean of the folds", "deviation"), (image, found.mean(0), found.std(0))
    for axes, each, name, colours in zip(panels, values, names, ("gray", "viridis", "magma"), strict=True):
        figure.colorbar(axes.imshow(each, cmap=colours), ax=axes, shrink=0.85)
        axes.set(title=name, xticks=[], yticks=[])
    title = f"Dice {dice[0]:.3f} of the ensemble, {min(dice[1:]):.3f} to {max(dice[1:]):.3f} of a fold ({where})"
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    figure.savefig(file)


if __name__ == "__main__":
    on_gpu, rng = handlepool.default_pool().driver.name == "cuda", np.random.default_rng(0)
    folds, (image, mask) = fitted(*scene(rng, 256), rng), scene(rng, 4096 if on_gpu else 384)
    draw(image, mask, segment(image, folds), [*sys.argv, "tiles.png"][1], "on GPUs" if on_gpu else "by the host driver")
