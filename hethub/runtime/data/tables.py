"""Documents in columns: parquet files, and folders as `datasets.save_to_disk` writes them. Needs pyarrow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hethub.runtime.data.sources import Piece, is_utf8, list_files
from hethub.spec.documents import read_json
from hethub.spec.errors import BadInput, suggest

_ROWS = 1024  # read at once
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise BadInput(
            "data sources parquet and hf need the package pyarrow: pip install 'hethub[data]'. text, jsonl and tokens need nothing."
        ) from None
    return pyarrow


def table_files(path: Path, kind: str) -> list[Path]:
    """The files of a parquet source or of a saved Hugging Face dataset, in order. Raises BadInput."""
    return list_files(path, ".parquet") if kind == "parquet" else _saved_files(path)


def _saved_files(folder: Path) -> list[Path]:
    if (folder / _SPLITS).is_file():
        splits = read_json(folder / _SPLITS, "list of splits")
        names = splits.get("splits") if isinstance(splits, dict) else None
        raise BadInput(
            f"{folder}: this folder holds splits ({', '.join(map(str, names or []))}); name the folder of one, such as "
            f"{folder / str((names or ['train'])[0])}."
        )
    if not (folder / _STATE).is_file():
        raise BadInput(
            f"{folder}: is no folder as `datasets.save_to_disk` writes it ({_STATE} is missing). Check the path; parquet files have "
            "the source parquet."
        )
    state = read_json(folder / _STATE, "state of a saved dataset")
    files = state.get("_data_files") if isinstance(state, dict) else None
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in files or []]
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise BadInput(f"{folder / _STATE}: names no data files of the folder. Save the dataset again.")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise BadInput(
            f"{folder / missing[0]}: the saved dataset names this file, and it is missing. Copy the folder again."
        )
    return [folder / name for name in names]


def table_pieces(files: list[Path], kind: str, column: str) -> Iterator[Piece]:
    """The text of the column, a document per row; empty ones are left out. A file's bytes are shared among its rows."""
    arrow = _pyarrow()
    read, what = (_parquet, "parquet file") if kind == "parquet" else (_saved, "file of a saved dataset")
    for path in files:
        try:
            yield from read(arrow, path, column)
        except (arrow.ArrowException, OSError) as error:
            raise BadInput(
                f"{path}: cannot be read as a {what} ({str(error).splitlines()[0]}). Copy it again."
            ) from None


def _parquet(arrow: Any, path: Path, column: str) -> Iterator[Piece]:
    size, row = path.stat().st_size, 0
    with arrow.parquet.ParquetFile(path) as file:
        num_rows = file.metadata.num_rows
        _check(arrow, file.schema_arrow, column, path)
        for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
            for value in batch.column(0):
                row += 1
                yield from _piece(value, row, size * row // num_rows - size * (row - 1) // num_rows, path, column)


def _saved(arrow: Any, path: Path, column: str) -> Iterator[Piece]:
    before = row = 0
    with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as stream:
        _check(arrow, stream.schema, column, path)
        for batch in stream:
            position, count = source.tell(), len(batch)
            for value in batch.column(stream.schema.get_field_index(column)):
                row += 1
                yield from _piece(value, row, (position - before) // count, path, column)
            before = position


def _piece(value: Any, row: int, num_bytes: int, path: Path, column: str) -> Iterator[Piece]:
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError as error:  # whoever wrote the file called bytes text
        raise BadInput(
            f"{path}, row {row}: `{column}` is no UTF-8 text ({error.reason} at byte {error.start}). Write the file again with text "
            "decoded, or without the row."
        ) from None
    if text and not is_utf8(text):
        raise BadInput(f"{path}, row {row}: `{column}` holds half a surrogate pair, which is no character.")
    if text:
        yield Piece(text, True, num_bytes)


def _check(arrow: Any, schema: Any, column: str, path: Path) -> None:
    if column not in schema.names:
        raise BadInput(
            f"{path}: has no column '{column}'; {suggest(column, schema.names)} A source's `text` names its column."
        )
    if schema.names.count(column) > 1:
        raise BadInput(f"{path}: has more than one column '{column}', so which holds the text is open; rename one.")
    found = schema.field(column).type
    if arrow.types.is_dictionary(found):  # pandas' categories
        found = found.value_type
    if not any(
        test(found) for test in (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_string_view)
    ):
        raise BadInput(
            f"{path}: column '{column}' holds {found}, no text. A source's `text` names its column; it has {', '.join(schema.names)}."
        )
