"""Curves of recall probes: what is drawn are the means, errors and runs that were given."""

from __future__ import annotations

import io
import math

import numpy as np
from matplotlib.image import imread
from tiny_ablation import ablation, base, group

from openk3.train.ablation.curves import curves_figure, curves_picture
from openk3.train.ablation.results import ACCURACY, Result
from openk3.train.ablation.summary import summarise

PROBE = {
    "kind": "probe",
    "probe": {"kind": "needle", "keys": 8, "values": 10, "filler": 8, "needles": 2},
    "lengths": [16, 32],
}
RIGHT = {  # by variant: a list for each seed, of the shares at 32, 64 and 128 tokens
    "block": [[0.9, 0.8, 0.7], [1.0, 0.6, 0.1]],
    "none": [[0.5, 0.4, 0.3], [0.5, 0.2, 0.3]],
}


def drawn():
    """The set, its results and their summary."""
    a = ablation(group(equal=["tokens"]), base={**base(), "data": PROBE})
    results = [
        Result(
            "depth", variant, "tokens", seed, f"{variant}{seed}", 1, 1,
            {f"{ACCURACY}{n}": share for n, share in zip((32, 64, 128), shares, strict=True)},
        )
        for variant, by_seed in RIGHT.items()
        for seed, shares in enumerate(by_seed)
    ]  # fmt: skip
    return a, summarise(a, results), results


def test_a_variant_is_a_curve_of_means_with_standard_errors_and_a_dot_for_each_run():
    a, lines, results = drawn()
    (axes,) = curves_figure(a, a.groups[0], lines, results).axes
    assert [bars.get_label() for bars in axes.containers] == ["block", "none"]
    for bars, by_seed in zip(axes.containers, RIGHT.values(), strict=True):
        curve, _, (errors,) = bars
        assert np.allclose(curve.get_ydata(), 100 * np.mean(by_seed, axis=0))
        assert np.allclose(curve.get_xdata(), [32, 64, 128], rtol=0.05)
        half = [float(np.ptp(segment[:, 1])) / 2 for segment in errors.get_segments()]
        assert np.allclose(half, 100 * np.std(by_seed, axis=0, ddof=1) / math.sqrt(2))
    dots = [line.get_ydata() for line in axes.lines if line.get_marker() == "."]
    assert np.allclose(dots, [np.multiply(100, shares) for by_seed in RIGHT.values() for shares in by_seed])


def test_beside_the_curves_stand_guessing_and_knowing_what_was_shown():
    a, lines, results = drawn()
    (axes,) = curves_figure(a, a.groups[0], lines, results).axes
    levels = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert np.allclose(levels["guesses"], 10)
    # The second of two answers is known then; the first is one of two, or an equal one out of ten.
    assert np.allclose(levels["knows what was shown, not where"], 100 * (1 + 1 / 2 + 1 / 2 / 10) / 2)
    (shade,) = axes.patches
    assert shade.get_x() + shade.get_width() == 32  # the longest sequence of the training


def test_the_picture_is_a_png_of_the_figure():
    a, lines, results = drawn()
    few = imread(io.BytesIO(curves_picture(a, a.groups[0], lines[:1], results)))
    both = imread(io.BytesIO(curves_picture(a, a.groups[0], lines, results)))
    assert few.shape == both.shape
    assert (few != both).any()
