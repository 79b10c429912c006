"Figures are sharp, and smoothing is unbiased."

import io
from types import SimpleNamespace

import IPython
import matplotlib.figure
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.core.pylabtools import select_figure_formats
from PIL import Image

from bertlab.core.plots import new_axes, smooth


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_gaps_in_the_curve(bad):
    values, whole = smooth([5.0, 4.0, bad, 3.0, 3.5], 4), smooth([5.0, 4.0, 3.0, 3.5], 4)
    assert np.isnan(values[2]) and np.delete(values, 2).tolist() == pytest.approx(whole.tolist())
    assert np.isnan(smooth([bad, 2.0], 4)).tolist() == [True, False]


def test_a_smoothed_constant_is_constant():
    assert smooth([3.0] * 5, 20).tolist() == pytest.approx([3.0] * 5)
    with pytest.raises(ValueError, match="span=0"):
        smooth([1.0], 0)
    for bad in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"span={bad}"):
            smooth([1.0], bad)


def test_a_notebook_draws_a_figure_once_and_sharp(monkeypatch):
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    select_figure_formats(shell, ["png"])  # as Colab begins
    drawn, savefig = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda *args, **options: drawn.append(savefig(*args, **options)),
    )
    figure, _ = new_axes("step", "loss (nats)", size=(3, 2))
    data, metadata = shell.display_formatter.format(figure)
    assert Image.open(io.BytesIO(data["image/png"])).size == (600, 400) and len(drawn) == 1
    assert metadata["image/png"] == {"width": 300, "height": 200}
