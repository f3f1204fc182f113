"""A CSV table of measurements as rows of text, and what its cells say."""

import csv
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from hethub.spec.documents import Source, check_regular
from hethub.spec.errors import BadInput

LARGEST = 10**7  # of any count in a table: larger ones are slips, and would be laid out one by one

THE_ROW = Source("the row")  # who is named, in a reason, as what breaks the rules of a spec


def columns_of(path: Path) -> list[str]:
    """The names in the first line of a CSV table. Raises BadInput where it cannot be read."""
    return _read(path)[0]


def read_lines(path: Path, required: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """The rows of a CSV table with their names: the column id, else the line. Raises BadInput where a column is
    missing or stands twice, and where a row has more cells than there are columns."""
    columns, rows = _read(path)
    if missing := [name for name in required if name not in columns]:
        raise BadInput(
            f"{path}: the table lacks the column(s) {', '.join(missing)}; its first line names the columns, "
            "with commas between them (docs/plans.md has an example)."
        )
    if twice := sorted({name for name in columns if name and columns.count(name) > 1}):
        raise BadInput(f"{path}: the table has the column(s) {', '.join(twice)} twice. Rename or remove one of each.")
    for line, cells in rows:
        if len(cells) > len(columns):
            raise BadInput(
                f"{path}, line {line}: it has {len(cells)} cells, and the first line names {len(columns)} columns. "
                "Put a text that holds a comma between double quotes, and no comma behind the last cell."
            )
    named = [(line, dict.fromkeys(columns, "") | dict(zip(columns, cells, strict=False))) for line, cells in rows]
    return [(row.get("id") or f"line {line}", row) for line, row in named]


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The cells of the first line, and those of every other that has some, with the line where each ends."""
    if not path.exists():
        raise BadInput(f"{path}: there is no such table. Check the path.")
    check_regular(path, "a table")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: the table cannot be read: {error}.") from None
    return (rows[0][1] if rows else []), rows[1:]


def check_named(row: Mapping[str, str], known: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError where a cell says none of what is known of its column; an empty one says nothing."""
    for key, values in known.items():
        if (text := row.get(key)) and text not in values:
            raise ValueError(f"{key} is {text!r}; it is {', '.join(values[:-1])} or {values[-1]}, or left empty")


class Numbers:
    """Whole numbers of a row; an empty cell is the default, or an error without one."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row

    def __call__(self, key: str, default: int | None = None) -> int:
        text = self.row.get(key) or ""
        if not text and default is not None:
            return default
        value = self.any(key)
        if not (0 if default == 0 else 1) <= value <= LARGEST or value != int(value):
            raise ValueError(f"{key} is {text or 'empty'}; a whole number is needed, up to {LARGEST:,}")
        return int(value)

    def positive(self, key: str) -> float | None:
        """A positive finite number; None for an empty cell."""
        if not self.row.get(key):
            return None
        if not 0 < (value := self.any(key)) < inf:
            raise ValueError(f"{key} is {self.row[key]}; a positive number is needed")
        return value

    def any(self, key: str) -> float:
        """Any number; 0 for an empty cell."""
        try:
            return float(self.row.get(key) or 0.0)
        except ValueError:
            raise ValueError(f"{key} is {self.row[key]!r}; a number is needed, without its unit") from None
