"""The few HTML elements the report is made of. Everything textual is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files


def document(title: str, body: str) -> str:
    """One self-contained page: styles inside, no script, nothing fetched."""
    style = files("openk3.train.report").joinpath("page.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        "</body>\n</html>\n"
    )


def header(eyebrow: str, title: str, lede: str) -> str:
    return (
        f'<header><p class="eyebrow">{escape(eyebrow)}</p><h1>{escape(title)}</h1>'
        f'<p class="lede">{escape(lede)}</p></header>'
    )


def notice(text: str) -> str:
    return f'<p class="notice">{escape(text)}</p>'


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """Large figures: (value, what it is, a remark)."""
    cells = (
        f'<div class="tile"><span>{escape(what)}</span><b>{escape(value)}</b>'
        f"<span>{escape(remark)}</span></div>"
        for value, what, remark in items
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def section(title: str, intro: str, cards: Sequence[str]) -> str:
    """Cards under a heading; nothing at all when there are none."""
    if not cards:
        return ""
    return (
        f'<section><h2>{escape(title)}</h2><p class="intro">{escape(intro)}</p>'
        f'<div class="grid">{"".join(cards)}</div></section>'
    )


def figure(title: str, unit: str, svg: str, *, now: str = "", wide: bool = False) -> str:
    """A drawing in a card; `now` is the value it ends at."""
    kind = "card wide" if wide else "card"
    latest = f"<output>{escape(now)}</output>" if now else ""
    caption = f"<figcaption><b>{escape(title)}</b><span>{escape(unit)}</span>{latest}</figcaption>"
    return f'<figure class="{kind}">{caption}{svg}</figure>'


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in a full-width card."""
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(v)}</td>" for v in row) + "</tr>" for row in rows)
    return (
        f'<figure class="card wide"><figcaption><b>{escape(title)}</b></figcaption><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def folded(title: str, text: str) -> str:
    """Preformatted text behind a summary line."""
    return f'<details class="card wide"><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>'


def footer(text: str) -> str:
    return f"<footer>{escape(text)}</footer>"
