"""The dataset of the examples: readable by Megatron, the same on every run, complete or absent."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import prepare_data


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    root = tmp_path / "sources"
    (root / "package" / "test").mkdir(parents=True)
    (root / "b.py").write_bytes(b"b = 2\n")
    (root / "a.py").write_bytes("a = 'é'\n".encode())
    (root / "empty.py").write_bytes(b"")
    (root / "package" / "c.py").write_bytes(b"c")
    (root / "package" / "test" / "left_out.py").write_bytes(b"x")
    return root


def tokens(text: bytes) -> list[int]:
    return [*text, prepare_data.END_OF_DOCUMENT]


def test_megatron_reads_what_was_written(sources: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data" / "text"
    assert prepare_data.main([str(prefix), "--source", str(sources)]) == 0

    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    documents = [data[index].tolist() for index in range(len(data))]
    assert documents == [tokens("a = 'é'\n".encode()), tokens(b"b = 2\n"), tokens(b"c")]
    assert data.document_indices.tolist() == [0, 1, 2, 3]
    assert data.sequence_lengths.tolist() == [len(document) for document in documents]


def test_the_files_are_the_same_on_every_run(sources: Path, tmp_path: Path) -> None:
    contents = []
    for name in ("first", "second"):
        assert prepare_data.main([str(tmp_path / name), "--source", str(sources)]) == 0
        contents.append([(tmp_path / f"{name}{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert contents[0] == contents[1]


def test_the_standard_library_is_found_and_cut_to_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "stdlib"
    assert prepare_data.main([str(prefix), "--max-mb", "0.2"]) == 0

    written = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    assert np.count_nonzero(written != prepare_data.END_OF_DOCUMENT) == 200_000
    assert f"{len(written):,} tokens" in capsys.readouterr().out


def test_an_interrupted_run_leaves_nothing(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(lengths: np.ndarray) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_data, "encode_index", fail)
    target = tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        prepare_data.main([str(target / "text"), "--source", str(sources)])
    assert list(target.iterdir()) == []


def test_a_folder_without_source_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nothing").mkdir()
    assert prepare_data.main([str(tmp_path / "out"), "--source", str(tmp_path / "nothing")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no Python source under")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["out", "--max-mb", "0"], ["out", "--max-mb", "nan"], ["/"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        prepare_data.main(arguments)
    assert stop.value.code == 2


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(min_value=1, max_value=1000), min_size=1, max_size=20))
def test_offsets_follow_the_lengths(lengths: list[int]) -> None:
    index = prepare_data.encode_index(np.array(lengths))
    header = 9 + 8 + 1 + 8 + 8
    offsets = np.frombuffer(index, dtype="<i8", count=len(lengths), offset=header + 4 * len(lengths))
    assert offsets.tolist() == [2 * sum(lengths[:position]) for position in range(len(lengths))]
    assert len(index) == header + (4 + 8) * len(lengths) + 8 * (len(lengths) + 1)
