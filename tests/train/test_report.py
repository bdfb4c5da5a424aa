"""The report page: what it shows of a run, whatever state the run is in."""

from __future__ import annotations

import itertools
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import tiny_config, tiny_run

from openk3.errors import CheckpointError, InvalidInput
from openk3.train.report import write_report
from openk3.train.report.run import Run, Series


class Page(HTMLParser):
    """Card titles, drawings, table cells, and every address the page would fetch."""

    VOID = {"meta", "path", "use", "image", "rect", "br", "link", "input"}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.addresses: list[str] = []
        self.drawings = self.scripts = 0
        self._open: list[str] = []
        self.text = text
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.scripts += tag == "script"
        self.drawings += tag == "svg"
        for name, value in attributes:
            if name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:")):
                self.addresses.append(value)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        if tag not in self.VOID:
            self.handle_starttag(tag, attributes)
            self._open.pop()
        else:
            self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-2:] == ["figcaption", "b"]:
            self.titles.append(data)


def page_of(folder) -> Page:
    return Page(write_report(folder).read_text())


def write_rows(folder, rows) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("a<run>&co")
    tiny_run(tiny_config(logging={"peak_flops": 1e12}), out)
    return out


def test_a_run_is_shown_with_all_its_curves_maps_and_tables(run_folder):
    page = page_of(run_folder)
    assert page.titles == [
        "Loss", "Bits per byte", "Gradient norm", "Learning rate",
        "Imbalance", "Dead experts", "Balance bias", "Expert load",
        "Load over time, layer 2", "Load over time, layer 3",
        "Largest attention logit", "KDA state norm", "Attention residuals",
        "Tokens per second", "MFU", "Layers, last values", "Evaluations",
    ]  # fmt: skip
    assert page.drawings == 15
    assert "2 layers (1 KDA, 1 MLA) · 8 experts, 2 per token" in page.text


def test_the_page_is_self_contained_and_follows_light_and_dark(run_folder):
    page = page_of(run_folder)
    assert page.scripts == 0
    assert page.addresses == []
    assert "prefers-color-scheme: dark" in page.text
    # What is drawn takes its colours from the page: no placeholder is left, no white ground is painted.
    assert "var(--c1)" in page.text
    assert "#010101" not in page.text
    assert "fill: #ffffff" not in page.text


def test_names_are_escaped(run_folder):
    page = page_of(run_folder)
    assert "a<run>" not in page.text
    assert "a&lt;run&gt;&amp;co" in page.text


def test_the_same_run_gives_the_same_page(run_folder):
    assert page_of(run_folder).text == page_of(run_folder).text


def test_a_run_without_a_step_says_so(tmp_path):
    write_rows(tmp_path, [])
    page = page_of(tmp_path)
    assert page.drawings == 0
    assert "No step has finished yet." in page.text


@pytest.mark.parametrize(
    "row",
    [
        {"step": 1},
        {"step": 1, "loss": None},
        {"step": 1, "loss": 2.0},
        {"step": 1, "loss": 2.0, "grad_norm": 0.0, "maxvio": {}, "load": {"1": [0, 0]}, "attn_res": {}},
        {"step": 1, "bits_per_byte": 1.0, "max_logit": {"0": None, "3": 5.0}, "warning": "<odd>"},
    ],
)
def test_missing_and_empty_values_leave_their_part_out(tmp_path, row):
    write_rows(tmp_path, [row])
    page = page_of(tmp_path)
    assert "nan" not in page.text.lower().replace("nano", "")
    assert page.text.count("&lt;odd&gt;") == ("warning" in row)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="not a run folder"):
        write_report(tmp_path)


def test_damaged_metrics_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match="line 1"):
        write_report(tmp_path)


def test_the_page_does_not_grow_with_the_run(tmp_path):
    rows = [{"step": s, "loss": 1 / s, "lr": 1.0, "grad_norm": 1.0} for s in range(1, 20001)]
    write_rows(tmp_path, rows[:1000])
    short = len(page_of(tmp_path).text)
    write_rows(tmp_path, rows)
    assert len(page_of(tmp_path).text) < 1.5 * short


values = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300)


@settings(max_examples=30, deadline=None)
@given(values, st.integers(1, 50))
def test_bins_keep_the_mean_of_the_series(numbers, most):
    series = Series(np.arange(1.0, len(numbers) + 1), np.array(numbers))
    binned = series.binned(most)
    assert len(binned) == min(len(numbers), most)
    assert binned.steps[0] >= 1
    assert binned.steps[-1] <= len(numbers)
    edges = np.linspace(0, len(numbers), len(binned) + 1).astype(int)
    expected = [np.mean(numbers[a:b]) for a, b in itertools.pairwise(edges)]
    np.testing.assert_allclose(binned.values, expected, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(values, st.floats(0.01, 1))
def test_smoothing_is_the_mean_of_the_last_values(numbers, share):
    series = Series(np.arange(1.0, len(numbers) + 1), np.array(numbers))
    width = max(1, round(share * len(numbers)))
    expected = [np.mean(numbers[max(0, i + 1 - width) : i + 1]) for i in range(len(numbers))]
    np.testing.assert_allclose(series.smoothed(share).values, expected, atol=1e-9)


def test_series_follow_layers_lists_and_gaps(tmp_path):
    run = Run(
        tmp_path, {}, [{"step": 1, "a": {"2": [1.0, 3.0]}}, {"step": 2}, {"step": 4, "a": {"10": 5, "2": 1}}]
    )
    assert list(run.by_layer("a")) == ["2", "10"]
    assert run.by_layer("a")["2"].values.tolist() == [2.0, 1.0]
    assert run.by_layer("a")["2"].steps.tolist() == [1.0, 4.0]
