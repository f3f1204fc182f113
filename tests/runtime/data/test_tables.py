"""Columns of parquet files and of a folder that `datasets` 5.2 itself has saved; every way in which they can be wrong."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from hethub.runtime.data import Dataset, open_dataset
from hethub.runtime.data.tables import table_files, table_pieces
from hethub.spec.errors import BadInput
from hethub.spec.job import DataSpec

arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'hethub[data]'")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'hethub[data]'")

END = 256
SAVED = Path(__file__).resolve().parents[2] / "support" / "saved_dataset"


def opened(base: Path, **spec: Any) -> Dataset:
    return open_dataset(DataSpec(**spec), base, seq_len=2, seed=1, vocab=257)


def tokens(data: Dataset) -> list[int]:
    return data.streams[0].tokens.tolist()


def documents(*texts: str) -> list[int]:
    return [token for text in texts for token in [*text.encode(), END]]


def write(path: Path, rows: int = 3000, column: str = "text") -> Path:
    """More rows than are read at once, in several groups, one of them empty and one null."""
    texts = [f"row {row}" for row in range(rows - 2)] + ["", None]
    parquet.write_table(arrow.table({"id": list(range(rows)), column: texts}), path, row_group_size=700)
    return path


def test_every_row_of_parquet_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "shards" / "deeper").mkdir(parents=True)
    write(tmp_path / "shards" / "deeper" / "b.parquet", rows=4, column="body")
    write(tmp_path / "shards" / "a.parquet", column="body")
    (tmp_path / "shards" / "README.md").write_text("no data")
    data = opened(tmp_path, source="parquet", path="shards", text="body")
    assert tokens(data) == documents(*(f"row {row}" for row in range(2998)), "row 0", "row 1")


def test_categories_of_pandas_are_text(tmp_path: Path) -> None:
    column = arrow.array(["one", "two", None, "one"]).dictionary_encode()
    parquet.write_table(arrow.table({"text": column}), tmp_path / "a.parquet")
    assert tokens(opened(tmp_path, source="parquet", path="a.parquet")) == documents("one", "two", "one")
    numbers = arrow.array([1, 2, 1]).dictionary_encode()
    parquet.write_table(arrow.table({"text": numbers}), tmp_path / "b.parquet")
    with pytest.raises(BadInput, match="column 'text' holds int64, no text"):
        opened(tmp_path, source="parquet", path="b.parquet")


def test_of_two_columns_of_one_name_none_is_taken(tmp_path: Path) -> None:
    """Was a KeyError."""
    twice = arrow.Table.from_arrays([arrow.array(["one"]), arrow.array(["two"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"a\.parquet: has more than one column 'text'.*; rename one"):
        opened(tmp_path, source="parquet", path="a.parquet")


def test_rows_of_a_saved_dataset_come_in_its_order() -> None:
    data = opened(SAVED.parent, source="hf", path="saved_dataset")
    assert tokens(data) == documents("ééé", *(f"row {row}" for row in range(5)))


def test_a_files_bytes_are_shared_among_its_rows(tmp_path: Path) -> None:
    """By them progress is told, whose whole is the files' sizes."""
    path = write(tmp_path / "a.parquet")
    found = [piece.num_bytes for piece in table_pieces([path], "parquet", "text")]
    size = path.stat().st_size
    assert 2998 * (size // 3000) <= sum(found) <= size
    assert max(found) - min(found) <= 1
    files = table_files(SAVED, "hf")
    assert len(files) == 2
    for file in files:
        rows = [piece.num_bytes for piece in table_pieces([file], "hf", "text")]
        assert 0 < sum(rows) <= file.stat().st_size


def test_a_column_that_is_not_there_is_named_with_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", column="txt")
    with pytest.raises(BadInput, match=r"a\.parquet: has no column 'text'; did you mean 'txt'"):
        opened(tmp_path, source="parquet", path="a.parquet")
    with pytest.raises(BadInput, match=r"column 'id' holds int64, no text"):
        opened(tmp_path, source="parquet", path="a.parquet", text="id")
    with pytest.raises(BadInput, match=r"data-00000-of-00002\.arrow: column 'n' holds int64"):
        opened(SAVED.parent, source="hf", path="saved_dataset", text="n")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(write(tmp_path / "whole.parquet").read_bytes()[:-40])
    with pytest.raises(BadInput, match=r"a\.parquet: cannot be read as a parquet file"):
        opened(tmp_path, source="parquet", path="a.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"holds no \.parquet files"):
        opened(tmp_path, source="parquet", path="empty")


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_a_row_that_is_no_utf8_is_named(tmp_path: Path, kind: str) -> None:
    """As of writers that call Latin-1 text; it ended in a traceback."""
    given = arrow.array([b"one", b"caf\xe9", b"two"])
    table = arrow.table({"text": arrow.StringArray.from_buffers(3, *given.buffers()[1:])})
    if kind == "parquet":
        parquet.write_table(table, tmp_path / "data")
    else:
        (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data"}]}')
        with arrow.ipc.new_stream(tmp_path / "data", table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(BadInput, match=r"data, row 2: `text` is no UTF-8 text .* at byte 3"):
        opened(tmp_path, source=kind, path="data" if kind == "parquet" else ".")


def test_a_folder_that_is_no_saved_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(BadInput, match=r"no folder as `datasets\.save_to_disk` writes it \(state\.json is missing\)"):
        opened(tmp_path, source="hf", path="plain")
    (tmp_path / "plain" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(BadInput, match=r"holds splits \(train, test\); name the folder of one, such as .*plain/train"):
        opened(tmp_path, source="hf", path="plain")
    copy = shutil.copytree(SAVED, tmp_path / "copy")
    (copy / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(BadInput, match=r"data-00001-of-00002\.arrow: the saved dataset names this file"):
        opened(tmp_path, source="hf", path="copy")
    (copy / "data-00001-of-00002.arrow").write_bytes(b"nonsense")
    with pytest.raises(BadInput, match="cannot be read as a file of a saved dataset"):
        opened(tmp_path, source="hf", path="copy")
    for state in ('{"_data_files": [{"filename": "../secret.arrow"}]}', "[]"):
        (copy / "state.json").write_text(state)
        with pytest.raises(BadInput, match="names no data files of the folder"):
            opened(tmp_path, source="hf", path="copy")
