"""What the report shows, and in which order. Every part is left out where the run has no data for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from openk3 import __version__
from openk3.config import ModelConfig, parse
from openk3.train.report import charts, html
from openk3.train.report.charts import Line
from openk3.train.report.run import Run

MANY_LAYERS = 6
"""Layers that are drawn as lines of their own; of more, evenly spaced ones are."""


def page(run: Run) -> str:
    """The whole page."""
    model = _model(run)
    body = [
        html.header("openk3 · training run", run.folder.resolve().name, _lede(run, model)),
        *(html.notice(text) for text in _warnings(run)),
        html.tiles(_figures(run)),
        html.section("Learning", "How well the next token is predicted, and by which steps.", _learning(run)),
        html.section(
            "Experts",
            "Load is counted over all tokens of a step. 1 is an expert's fair share.",
            _experts(run),
        ),
        html.section(
            "Attention and depth",
            "MLA logits against their clipping threshold, the size of KDA's memories, and which "
            "earlier blocks each sublayer reads.",
            _attention(run),
        ),
        html.section(
            "Speed",
            "A step is loading, forward, backward and update; evaluation and checkpoints count in the "
            "run's time only.",
            _speed(run),
        ),
        html.section("Details", "", [*_layer_table(run, model), *_evaluations(run), *_configuration(run)]),
        html.footer(f"Written by openk3 {__version__} from metrics.jsonl."),
    ]
    return html.document(f"{run.folder.resolve().name} · openk3", "\n".join(part for part in body if part))


def _model(run: Run) -> ModelConfig | None:
    values = run.config.get("model")
    return parse(ModelConfig, values, f"{run.folder}/config.toml") if isinstance(values, dict) else None


def _lede(run: Run, model: ModelConfig | None) -> str:
    if model is None:
        return "This run folder has no config.toml."
    from openk3.model.sizes import count

    sizes = count(model)
    mla = len(model.mla_layer_numbers)
    parts = [
        f"{_quantity(sizes.total)} parameters, {_quantity(sizes.active)} active",
        f"{model.num_layers} layers ({model.num_layers - mla} KDA, {mla} MLA)",
    ]
    if model.moe is not None:
        parts.append(f"{model.moe.num_experts} experts, {model.moe.experts_per_token} per token")
    return " · ".join([*parts, f"vocabulary {model.vocab_size:,}"])


def _warnings(run: Run) -> list[str]:
    if not run.rows:
        return ["No step has finished yet."]
    return [f"Step {row['step']}: {row['warning']}" for row in run.rows if row.get("warning")]


def _figures(run: Run) -> list[tuple[str, str, str]]:
    """The large figures on top."""
    out = []
    bpb, val, loss = run.series("bits_per_byte"), run.series("val_loss"), run.series("loss")
    if len(bpb):
        out.append((f"{bpb.last:.3f}", "validation bits per byte", f"best {bpb.values.min():.3f}"))
    if len(val):
        out.append((f"{val.last:.3f}", "validation loss", "nats per token"))
    if len(loss):
        out.append((f"{loss.smoothed().last:.3f}", "training loss", f"started at {loss.values[0]:.2f}"))
    if len(tokens := run.series("tokens")):
        out.append((_quantity(tokens.last), "tokens seen", f"{len(loss):,} steps"))
    if len(rate := run.series("tokens_per_second")):
        mfu = run.series("mfu")
        share = f"{median(mfu.values):.1%} of peak (MFU)" if len(mfu) else "median over steps"
        out.append((_quantity(median(rate.values)), "tokens per second", share))
    if len(seconds := run.series("seconds")):
        skipped = sum(bool(row.get("skipped")) for row in run.rows)
        remark = f"{skipped} skipped step{'s' * (skipped != 1)}"
        out.append((_duration(seconds.last), "training time", remark))
    return out


def _learning(run: Run) -> list[str]:
    loss, val = run.series("loss"), run.series("val_loss")
    cards = []
    if len(loss):
        drawn = [Line(loss, faint=True), Line(loss.smoothed(), "training")]
        if len(mtp := run.series("mtp_loss")):
            drawn.append(Line(mtp.smoothed(), "one token further (MTP)", color=3))
        if len(val):
            drawn.append(Line(val, "validation", color=1, dots=True))
        # The fall of the first steps would flatten all that follows.
        ceiling = 1.05 * float(loss.smoothed().values[len(loss) // 20]) if len(loss) > 100 else None
        svg = charts.lines(drawn, ceiling=ceiling)
        cards.append(html.figure("Loss", "nats per token", svg, now=f"{loss.smoothed().last:.3f}"))
    cards += _curve(run, "bits_per_byte", "Bits per byte", "validation", "{:.3f}", color=1, dots=True)
    norm = run.series("grad_norm")
    if len(norm):
        drawn = [Line(norm, faint=True, color=2), Line(norm.smoothed(), color=2)]
        cards.append(
            html.figure(
                "Gradient norm", "before clipping", charts.lines(drawn, log=True), now=f"{norm.last:.3g}"
            )
        )
    return cards + _curve(run, "lr", "Learning rate", "of the matrices", "{:.2e}", color=4, floor=0)


def _experts(run: Run) -> list[str]:
    cards = _layers(run, "maxvio", "Imbalance", "maxvio: largest load / fair share - 1", "{:.2f}")
    cards += _layers(run, "dead_experts", "Dead experts", "share that received no token in a step", "{:.1%}")
    cards += _layers(
        run, "bias_range", "Balance bias", "largest minus smallest of a layer", "{:.3f}", floor=None
    )
    cards += _load_at_the_end(run)
    return cards + _load_over_time(run)


def _load_at_the_end(run: Run) -> list[str]:
    snapshots = run.snapshots("load")
    if not snapshots:
        return []
    step, load = snapshots[-1]
    load = dict(sorted(load.items(), key=lambda item: int(item[0])))
    shares = charts.padded({layer: _fair_shares(counts) for layer, counts in load.items()})
    svg = charts.heat_map(
        shares,
        rows=[f"layer {int(layer) + 1}" for layer in load],
        columns=[str(i) for i in range(shares.shape[1])],
        colormap=charts.LOAD,
        limits=(0, 2),
        annotate=shares.shape[1] <= 24 and shares.shape[0] <= 24,
        x_label="expert",
        wide=True,
    )
    return [html.figure("Expert load", f"fair shares, step {step:,}", svg, wide=True)]


def _load_over_time(run: Run) -> list[str]:
    snapshots = run.snapshots("load")
    if len(snapshots) < 2:
        return []
    cards = []
    for layer in _some(sorted({name for _, load in snapshots for name in load}, key=int), 4):
        columns = [(step, _fair_shares(load[layer])) for step, load in snapshots if layer in load]
        matrix = np.array([shares for _, shares in columns]).T  # [experts, snapshots]
        svg = charts.heat_map(
            matrix,
            rows=[str(i) for i in range(matrix.shape[0])],
            columns=[f"{step:,}" for step, _ in columns],
            colormap=charts.LOAD,
            limits=(0, 2),
            x_label="step",
            y_label="expert",
        )
        cards.append(html.figure(f"Load over time, layer {int(layer) + 1}", "fair shares", svg))
    return cards


def _attention(run: Run) -> list[str]:
    tau = run.config.get("optim", {}).get("qk_clip_tau")
    logits = run.by_layer("max_logit")
    near = isinstance(tau, int | float) and any(s.values.max() > 0.5 * tau for s in logits.values())
    cards = _layers(
        run, "max_logit", "Largest attention logit", "per MLA layer", "{:.1f}", level=tau if near else None
    )
    if any(s.values.any() for s in run.by_layer("clipped_heads").values()):
        cards += _layers(run, "clipped_heads", "Clipped heads", "QK-clip, per MLA layer", "{:.0f}")
    cards += _layers(run, "state_norm", "KDA state norm", "mean over heads and sequences", "{:.2f}")
    return cards + _attn_res(run)


def _attn_res(run: Run) -> list[str]:
    snapshots = run.snapshots("attn_res")
    if not snapshots:
        return []
    step, weights = snapshots[-1]
    matrix = charts.padded(weights)
    columns = ["embedding", *(f"block {i}" for i in range(1, matrix.shape[1]))]
    svg = charts.heat_map(
        matrix,
        rows=[_sublayer(name) for name in weights],
        columns=columns,
        limits=(0, 1),
        annotate=matrix.shape[1] <= 14 and matrix.shape[0] <= 40,
        wide=True,
    )
    unit = f"mean weight of each source, step {step:,}; a row's last block may still be growing"
    return [html.figure("Attention residuals", unit, svg, wide=True)]


def _speed(run: Run) -> list[str]:
    cards = _curve(run, "tokens_per_second", "Tokens per second", "within a step", "{:,.0f}", floor=0)
    return cards + _curve(run, "mfu", "MFU", "share of the device's peak", "{:.2%}", color=3, floor=0)


def _curve(
    run: Run,
    key: str,
    title: str,
    unit: str,
    form: str,
    *,
    color: int = 0,
    dots: bool = False,
    floor: float | None = None,
) -> list[str]:
    series = run.series(key)
    if not len(series):
        return []
    svg = charts.lines([Line(series, color=color, dots=dots)], floor=floor, percent=form.endswith("%}"))
    return [html.figure(title, unit, svg, now=form.format(series.last))]


def _layers(
    run: Run,
    key: str,
    title: str,
    unit: str,
    form: str,
    *,
    floor: float | None = 0,
    level: float | None = None,
) -> list[str]:
    """A line per layer; the number is the largest of all layers at the end."""
    series = run.by_layer(key)
    if not series:
        return []
    shown = _some(list(series), MANY_LAYERS)
    drawn = [Line(series[name], f"layer {int(name) + 1}", color=i) for i, name in enumerate(shown)]
    now = form.format(max(s.last for s in series.values()))
    svg = charts.lines(drawn, floor=floor, level=level, percent=form.endswith("%}"))
    return [html.figure(title, unit, svg, now=now)]


def _layer_table(run: Run, model: ModelConfig | None) -> list[str]:
    """Each layer's last values."""
    if model is None or not run.rows:
        return []
    formats: Mapping[str, tuple[str, Callable[[float], str]]] = {
        "load_max": ("fullest expert / mean", "{:.2f}".format),
        "dead_experts": ("dead experts", "{:.1%}".format),
        "bias_range": ("bias range", "{:.3f}".format),
        "max_logit": ("max logit", "{:.1f}".format),
        "state_norm": ("KDA state norm", "{:.2f}".format),
    }
    series = {key: run.by_layer(key) for key in formats}
    rows = []
    for i in range(model.num_layers + model.mtp_layers):
        extra = i == model.num_layers
        kind = ("MLA" if extra or model.is_mla(i) else "KDA") + (
            " + experts" if extra or model.is_moe(i) else " + dense"
        )
        cells = [
            form(series[key][str(i)].last) if str(i) in series[key] else "·"
            for key, (_, form) in formats.items()
        ]
        rows.append([f"{'MTP' if extra else i + 1} · {kind}", *cells])
    return [html.table("Layers, last values", ["layer", *(t for t, _ in formats.values())], rows)]


def _evaluations(run: Run) -> list[str]:
    rows = [
        [
            f"{row['step']:,}",
            _quantity(row.get("tokens", 0)),
            f"{row['val_loss']:.4f}",
            _or_dot(row, "bits_per_byte"),
        ]
        for row in run.rows
        if isinstance(row.get("val_loss"), float)
    ]
    columns = ["step", "tokens seen", "validation loss", "bits per byte"]
    return [html.table("Evaluations", columns, _some(rows, 12))] if rows else []


def _configuration(run: Run) -> list[str]:
    path = run.folder / "config.toml"
    return [html.folded("Configuration (config.toml)", path.read_text())] if path.is_file() else []


def _or_dot(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    return f"{value:.4f}" if isinstance(value, float) else "·"


def _some(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _fair_shares(counts: Sequence[float]) -> list[float]:
    mean = sum(counts) / max(len(counts), 1)
    return [c / mean if mean else math.nan for c in counts]


def _sublayer(name: str) -> str:
    """`layers.3.attn` as `4 attention`."""
    if name == "output":
        return "output"
    _, index, part = name.split(".")
    return f"{int(index) + 1} {'attention' if part == 'attn' else 'feed-forward'}"


def _quantity(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
