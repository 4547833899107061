"""Tables as one page of HTML that loads nothing: they sort by a click on a column and show what is searched for."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path

from peft_surgical.files.safetensors_io import written_aside


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A head and rows of as many cells."""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; }}
body {{ max-width: 64rem; margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.3rem; }}
h2 {{ font-size: 1.05rem; margin: 1.5rem 0 .3rem; }}
p {{ margin: .2rem 0; }}
input {{ font: inherit; margin: 1rem 0 0; padding: .3rem .5rem; width: min(20rem, 100%); box-sizing: border-box; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; overflow-wrap: normal; }}
th, td {{ padding: .25rem .5rem; text-align: left; border-bottom: 1px solid #8884; }}
th {{ cursor: pointer; vertical-align: bottom; }}
th[aria-sort=ascending]::after {{ content: " ↑"; }}
th[aria-sort=descending]::after {{ content: " ↓"; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
td.number {{ white-space: nowrap; }}
td {{ background: linear-gradient(to right, #3a82f666 var(--bar, 0%), transparent 0); }}
@media (max-width: 40rem) {{ :root {{ font-size: 13px; }} th, td {{ padding: .25rem; }} }}
</style>
<h1>{title}</h1>
{facts}
<input type="search" placeholder="Search" aria-label="Search">
{tables}
<script>
const number = text => text.trim() ? Number(text.replaceAll(",", "")) : NaN;
const order = (a, b) => isNaN(number(a)) || isNaN(number(b))
  ? isNaN(number(b)) - isNaN(number(a)) || a.localeCompare(b, undefined, {{numeric: true}}) : number(a) - number(b);
for (const head of document.querySelectorAll("th")) head.tabIndex = 0, head.onclick = head.onkeydown = event => {{
  if (event.key && event.key !== "Enter") return;
  const body = head.closest("table").tBodies[0], cell = row => row.cells[head.cellIndex].textContent;
  const rows = [...body.rows].sort((a, b) => order(cell(a), cell(b)));
  const up = head.ariaSort ? head.ariaSort === "descending" : head.className !== "number";  // large numbers first
  for (const other of head.parentNode.cells) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
  body.append(...(up ? rows : rows.reverse()));
}};
document.querySelector("input").oninput = event => {{
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const row of document.querySelectorAll("tbody tr")) {{
    const text = [...row.querySelectorAll("td:not(.number)")].map(cell => cell.textContent.toLowerCase()).join(" ");
    row.hidden = !words.every(word => text.includes(word));
  }}
}};
</script>
</html>
"""


def write_page(
    path: str | os.PathLike,
    title: str,
    facts: Sequence[str],
    tables: Mapping[str, Table],
    bars: Collection[str] = (),
) -> None:
    """Write tables to a page of HTML.

    Args:
        path: The file.
        title: What the page is about.
        facts: Lines above the tables.
        tables: The tables by their headings.
        bars: The columns whose numbers have bars behind them, as long as these are large.
    """
    text = _PAGE.format(
        title=escape(title),
        facts="\n".join(f"<p>{escape(fact)}</p>" for fact in facts),
        tables="\n".join(f"<h2>{escape(name)}</h2>\n{_table(*found, bars)}" for name, found in tables.items()),
    )
    with written_aside(Path(path)) as new:
        new.write_text(text, encoding="utf-8")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], bars: Collection[str]) -> str:
    tops = [max(map(_number, column), default=0.0) for _, *column in zip(head, *rows, strict=True)]

    def line(tag: str, cells: Sequence[str]) -> str:
        made = []
        for name, top, cell in zip(head, tops, cells, strict=True):
            bar = f" style=--bar:{_number(cell) / top:.1%}" if top and name in bars and tag == "td" else ""
            text = escape(cell) if top else escape(cell).replace(".", ".<wbr>")
            made.append(f"<{tag}{' class=number' if top else ''}{bar}>{text}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f"<div><table><thead>{line('th', head)}</thead>\n<tbody>\n{body}\n</tbody></table></div>"


def _number(cell: str) -> float:
    """What a cell says; 0 if that is no number above 0."""
    try:
        number = float(cell.replace(",", ""))
    except ValueError:
        return 0.0
    return number if 0 < number < math.inf else 0.0
