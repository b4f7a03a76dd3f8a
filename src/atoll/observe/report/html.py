"""Small pieces of HTML. Whatever comes from a run is escaped here: an `Html` may stand on a page, a `str` may not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NewType

Html = NewType("Html", str)
STYLE = """\
header { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline; gap: 0 24px }
nav { position: sticky; top: 0; z-index: 9; background: var(--paper); border-bottom: 1px solid var(--line); \
margin: 8px 0 20px; padding: 8px 0; display: flex; flex-wrap: wrap; gap: 4px 18px }
a { color: inherit; text-decoration-color: var(--faint); text-underline-offset: 3px }
section { margin: 0 0 40px; scroll-margin-top: 56px }
h2 { margin: 0 0 4px; font-size: 18px; font-weight: 600 }
h3 { margin: 18px 0 4px; font-size: 15px; font-weight: 600 }
.note { border-left: 4px solid #E69F00; padding: 8px 14px; margin: 12px 0; \
background: color-mix(in srgb, #E69F00 10%, var(--paper)) }
.note b, .note li { color: var(--ink) } .note ul { margin: 4px 0; padding-left: 20px }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(172px, 1fr)); gap: 12px; margin: 12px 0 }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; break-inside: avoid }
.card span { display: block; color: var(--faint); font-size: 13px }
.card b { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 4px 0 12px }
th { text-align: left; font-weight: 600; color: var(--faint); font-size: 13px; border-bottom: 1px solid var(--line) }
td { border-bottom: 1px solid var(--line); vertical-align: top }
th, td { padding: 5px 18px 5px 0 } .right { text-align: right; white-space: nowrap }
tr { break-inside: avoid }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; margin: 8px 0; \
font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.settings pre { columns: 3 240px; column-gap: 40px }
.told { color: var(--ink); max-width: 90ch }
summary { cursor: pointer; margin: 8px 0 }
@media print { nav { display: none } main { padding: 0; max-width: none } section { margin-bottom: 24px } \
.figure, pre { break-inside: avoid } .cards { grid-template-columns: repeat(4, 1fr) } h2 { break-after: avoid } }
"""


def text(value: str) -> Html:
    return Html(escape(value))


def join(parts: Iterable[Html]) -> Html:
    return Html("\n".join(parts))


def paragraph(value: str, kind: str = "") -> Html:
    return Html(f'<p class="{kind}">{escape(value)}</p>' if kind else f"<p>{escape(value)}</p>")


def heading(value: str) -> Html:
    return Html(f"<h3>{escape(value)}</h3>")


def cards(facts: Iterable[tuple[str, str, str]]) -> Html:
    """A name, its figure and a word under it each."""
    made = (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(figure)}</b><span>{escape(words)}</span></div>'
        for name, figure, words in facts
    )
    return Html(f'<div class="cards">{"".join(made)}</div>')


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[int] = (0,)) -> Html:
    """The columns whose places are in `words` stand at the left, the others are figures."""
    left = set(words)

    def row(tag: str, cells: Sequence[str]) -> str:
        made = (f"<{tag}{'' if at in left else RIGHT}>{escape(cell)}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return Html(f'<div class="scroll"><table><thead>{row("th", columns)}</thead><tbody>{body}</tbody></table></div>')


RIGHT = ' class="right"'


def folded(title: str, body: Html) -> Html:
    return Html(f"<details><summary>{escape(title)}</summary>{body}</details>")


def verbatim(value: str) -> Html:
    return Html(f"<pre>{escape(value)}</pre>")


def note(title: str, sentences: Iterable[str]) -> Html:
    points = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return Html(f'<div class="note"><b>{escape(title)}</b><ul>{points}</ul></div>')
