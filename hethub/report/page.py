"""One self-contained HTML page: its frame, its style and its tables."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from hethub.spec.documents import write_text


def write_html(out: Path, title: str, parts: Sequence[str]) -> None:
    """Writes a page that needs no other file."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    write_text(f"{head}<h1>{escape(title)}</h1>{''.join(parts)}</html>\n", out)


def section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{cells}</table>"


_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1000px;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #ddd}h3{font-size:1em}
table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #eee}
svg{max-width:100%;height:auto}svg text{font-size:10px;fill:#444}
.legend span{margin-right:1em}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
.cluster{display:flex;flex-wrap:wrap;gap:.8em}.node{border:1px solid #ccc;border-radius:4px;padding:.4em .6em}
.node i{display:inline-block;min-width:1.8em;padding:.2em;margin:.1em;border-radius:3px;text-align:center;font-style:normal;color:#fff}
"""
