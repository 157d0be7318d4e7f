"""The tiles of an image join without a seam, and each fold has its own values. No GPU is needed."""

import numpy as np
import pytest
import tiles

import handlepool

pytestmark = pytest.mark.usefixtures("handlepool_leak_check")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 16)


@pytest.fixture
def labelled(small_tiles):
    """Return an image of 5 x 1 tiles with its mask, and a source of random numbers."""
    rng = np.random.default_rng(0)
    mask = np.zeros((5 * tiles.TILE, tiles.TILE), bool)
    mask[::2, 3:10] = True
    return mask + 0.1 * rng.standard_normal(mask.shape, dtype=np.float32), mask, rng


def test_tiles_join_to_the_ensemble_of_the_whole_image(handlepool_host_pool, handlepool_no_gpu, labelled):
    image, mask, rng = labelled
    folds = tiles.fitted(image.astype(np.float32), mask, rng)
    found = tiles.segment(image[: 2 * tiles.TILE].astype(np.float32), folds)
    whole = np.pad(image[: 2 * tiles.TILE].astype(np.float32), tiles.MARGIN, mode="reflect")[None, None]
    on_device = [[handlepool.asarray(each) for each in fold] for fold in folds]
    expected = handlepool.asnumpy(tiles.ensemble(handlepool.asarray(whole), on_device))[0][tiles.INSIDE]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert found.shape == (tiles.FOLDS, 2 * tiles.TILE, tiles.TILE)
    assert all(found[fold].std() > 0 for fold in range(tiles.FOLDS))
    assert np.ptp(found, axis=0).max() > 0


def test_the_folds_find_the_discs(handlepool_host_pool, tmp_path):
    rng = np.random.default_rng(0)
    folds = tiles.fitted(*tiles.scene(rng, 64), rng)
    image, mask = tiles.scene(rng, 64)
    found = tiles.segment(image, folds)
    assert np.mean((found.mean(0) > 0.5) == mask) > 0.9
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, and it is not installed")
    tiles.draw(image, mask, found, tmp_path / "tiles.png", "by the host driver")
    assert (tmp_path / "tiles.png").stat().st_size > 1000
