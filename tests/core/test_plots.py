"Figures are compact, and smoothing is unbiased."

import io

import numpy as np
import pytest
from PIL import Image

from bertlab.core.plots import compact_png, new_axes, smooth


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_gaps(bad):
    values, finite = smooth([5.0, 4.0, bad, 3.0, 3.5], 4), smooth([5.0, 4.0, 3.0, 3.5], 4)
    assert np.isnan(values[2]) and np.delete(values, 2).tolist() == pytest.approx(finite.tolist())
    assert np.isnan(smooth([bad, 2.0], 4)).tolist() == [True, False]


def test_a_smoothed_constant_is_constant():
    assert smooth([3.0] * 5, 20).tolist() == pytest.approx([3.0] * 5)
    with pytest.raises(ValueError, match="span=0"):
        smooth([1.0], 0)
    for bad in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"span={bad}"):
            smooth([1.0], bad)


def test_a_figure_is_stored_compactly():
    figure, axes = new_axes("step", "loss (nats)", size=(3, 2))
    axes.plot([1, 2, 3])
    png = figure._repr_png_()
    picture = Image.open(io.BytesIO(png))
    assert picture.size == (300, 200) and len(picture.getcolors()) <= 64
    assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert compact_png(png) == compact_png(png, 300) == png  # nothing left to do
    assert Image.open(io.BytesIO(compact_png(png, 150))).size == (150, 100)
