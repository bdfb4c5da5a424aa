"""Results as Markdown for readers and as CSV for programs. Pure: text out, no file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openk3.train.ablation.config import AblationSet, Group, flat
from openk3.train.ablation.results import ACCURACY, Result
from openk3.train.ablation.summary import Choice, Line, Mean, comparisons


@dataclass(frozen=True)
class _Column:
    name: str
    heading: str
    digits: int
    scale: float = 1.0
    difference: bool = False
    """Whether the difference to the baseline has a column too."""


_COLUMNS = (
    _Column("bits_per_byte", "bits per byte", 4, difference=True),
    _Column("val_loss", "validation loss", 4),
    _Column("train_loss", "training loss", 3),
    _Column("maxvio", "maxvio", 2),
    _Column("dead_experts", "dead experts, %", 1, scale=100),
    _Column("spikes", "spikes", 1),
    _Column("tokens", "tokens, M", 3, scale=1e-6),
    _Column("flops", "FLOPs, 10^12", 3, scale=1e-12),
    _Column("seconds", "seconds", 0),
)

_SAME = "At equal tokens, which are equal training FLOPs here"
_HEADINGS = {"tokens": "At equal tokens", "flops": "At equal training FLOPs"}


def markdown(
    ablation: AblationSet,
    lines: Sequence[Line],
    choices: Sequence[Choice],
    failures: Mapping[str, str],
    made: Mapping[str, Any],
) -> str:
    """A page of tables: a section for each group, the searches, the runs that failed.

    Args:
        failures: why runs failed, by label.
        made: where and how the numbers were made, in words.
    """
    parts = [f"## {ablation.name}", ablation.description, _how_made(ablation, made)]
    for group in ablation.groups:
        parts += [f"### {ablation.name}: {group.name}", group.question, *_tables(group, lines)]
    if choices:
        parts += [f"### {ablation.name}: searches", *_searches(ablation, choices)]
    if failures:
        parts += [f"### {ablation.name}: failed runs"]
        parts += ["\n".join(f"- {label}: {reason}" for label, reason in failures.items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def headline(line: Line) -> str:
    """What a variant is judged by, with its difference to the baseline, in a line."""
    parts = []
    for column in _columns([line]):
        if column.difference:
            difference = _cell(line.differences.get(column.name), column, "+")
            text = f"{_cell(line.values[column.name], column)} {column.heading}"
            parts.append(f"{text} ({difference})" if line.differences else text)
    return ", ".join(parts)


def csv_text(results: Sequence[Result]) -> str:
    """A line for each run in each of its places."""
    names = list(dict.fromkeys(name for result in results for name in result.measured))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["group", "variant", "equal", "seed", "parameters", "active_parameters", *names, "folder"]
    )
    for r in results:
        values = [r.measured.get(name, "") for name in names]
        writer.writerow([r.group, r.variant, r.equal, r.seed, r.parameters, r.active, *values, r.folder])
    return out.getvalue()


def candidate_text(candidate: Mapping[str, Any]) -> str:
    """A candidate's fields in a line."""
    return ", ".join(f"{name} = {text}" for name, text in flat(candidate).items())


def _how_made(ablation: AblationSet, made: Mapping[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in made.items())
    seeds = len(ablation.seeds)
    means = (
        f"Means over {seeds} seeds ± standard error. Differences are to the first line, seed by seed: the "
        "same weights at the start and the same order of the data."
        if seeds > 1
        else "One seed: no errors can be given."
    )
    return f"{means} {facts}."


def _tables(group: Group, lines: Sequence[Line]) -> list[str]:
    own = [line for line in lines if line.group == group.name]
    if not own:
        return ["No run of this group has a result."]
    equals = comparisons(group, own)
    parts = []
    for equal in equals:
        parts += [f"{_HEADINGS[equal] if equals == group.equal else _SAME}:"]
        parts += [_table(group, [line for line in own if line.equal == equal])]
    return parts


def _table(group: Group, lines: Sequence[Line]) -> str:
    columns = _columns(lines)
    headings = ["variant"]
    for column in columns:
        headings += [column.heading, "difference"] if column.difference else [column.heading]
    headings += ["parameters, M", "active, M", "runs"]
    rows = []
    for line in lines:
        cells = [line.variant]
        for column in columns:
            cells.append(_cell(line.values.get(column.name), column))
            if column.difference:
                is_baseline = line.variant == group.baseline.name
                cells.append(
                    "baseline" if is_baseline else _cell(line.differences.get(column.name), column, "+")
                )
        runs = str(line.runs) if line.runs == line.wanted else f"{line.runs} of {line.wanted}"
        rows.append([*cells, f"{line.parameters / 1e6:.3f}", f"{line.active / 1e6:.3f}", runs])
    return _grid(headings, rows)


def _columns(lines: Sequence[Line]) -> list[_Column]:
    names = {name for line in lines for name in line.values}
    lengths = sorted(int(name.removeprefix(ACCURACY)) for name in names if name.startswith(ACCURACY))
    probed = [_Column(f"{ACCURACY}{n}", f"% right at {n:,}", 1, scale=100, difference=True) for n in lengths]
    return probed + [column for column in _COLUMNS if column.name in names]


def _cell(mean: Mean | None, column: _Column, sign: str = "") -> str:
    if mean is None:
        return "-"
    text = f"{mean.value * column.scale:{sign}.{column.digits}f}"
    error = f"{(mean.error or 0) * column.scale:.{column.digits}f}"
    return f"{text} ± {error}" if float(error) else text  # tokens and the like are the same in all runs


def _searches(ablation: AblationSet, choices: Sequence[Choice]) -> list[str]:
    seeds = ", ".join(map(str, ablation.search_seeds))
    rows = []
    for choice in choices:
        group = next(g for g in ablation.groups if g.name == choice.group)
        variant = next(v for v in group.variants if v.name == choice.variant)
        for i, (candidate, scored) in enumerate(zip(variant.candidates, choice.scored, strict=True)):
            said = "chosen" if i == choice.chosen else ""
            if said and choice.at_the_edge and len(choice.scored) > 1:
                said = "chosen, at the edge of what was tried"
            text = "failed" if scored is None else f"{scored:.4f}"
            rows.append([choice.group, choice.variant, candidate_text(candidate), text, said])
    what = (
        f"Candidates were tried at full length with the seeds {seeds}, which no table above contains. The "
        "score is what the variant is judged by: bits per byte, or the share of wrong answers."
    )
    return [what, _grid(["group", "variant", "candidate", "score", ""], rows, words=3)]


def _grid(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table; the first `words` columns are text."""
    lines = [headings, ["---"] * words + ["---:"] * (len(headings) - words), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
