"""Writes a Megatron dataset of real text that is on every machine: `prepare_data.py PREFIX [--max-mb N]`.

The text is the source of Python's standard library; a token is a byte, and every file ends with token 256.
Train on it without a download, with any vocabulary above 256 (a larger one only makes the head heavier):

    --data-path PREFIX --tokenizer-type NullTokenizer --null-tokenizer-eod-id 256 --vocab-size 16384

Neither torch nor Megatron is imported. The two files are complete or absent, and the same on every run.
"""

import argparse
import hashlib
import os
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
_TOKEN_DTYPE = np.dtype("<u2")
_UINT16_CODE = 8  # of Megatron's list of data types
_FEWEST_DOCUMENTS_TO_SPLIT = 100  # so that 1 % is a document
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
# Left out: tests repeat themselves and hold broken bytes on purpose; the others are not the library's.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tests"}
)


def find_sources(root: Path) -> list[Path]:
    """The Python files under `root` in the order of their paths; raises FileNotFoundError without any."""
    sources = sorted(
        path
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts) and path.is_file()
    )
    if not sources:
        raise FileNotFoundError(
            f"no Python source under {root}: a standard library in files is needed; give one with --source"
        )
    return sources


def read_documents(sources: Iterable[Path], *, max_bytes: int) -> Iterator[np.ndarray]:
    """One array of tokens a file, end of document included, until `max_bytes` of text; the last is cut."""
    remaining = max_bytes
    for path in sources:
        text = path.read_bytes()[:remaining]
        if text:
            remaining -= len(text)
            yield np.append(np.frombuffer(text, dtype=np.uint8), END_OF_DOCUMENT).astype(_TOKEN_DTYPE)
        if remaining <= 0:
            return


def write_dataset(prefix: Path, documents: Iterable[np.ndarray], *, num_expected: int) -> tuple[int, int]:
    """Write PREFIX.bin and PREFIX.idx in Megatron's indexed format; returns documents and tokens written.

    The format is that of `megatron.core.datasets.indexed_dataset`: tokens one after another, and an index of
    lengths (int32), byte offsets (int64) and document boundaries (int64), here one sequence a document.
    """
    tokens_file, index_file = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths: list[int] = []
    temporary = [path.with_name(f".{path.name}.{os.getpid()}") for path in (tokens_file, index_file)]
    try:
        with temporary[0].open("wb") as stream:
            for document in documents:
                stream.write(document.tobytes())
                lengths.append(len(document))
                show_progress(len(lengths), num_expected, sum_tokens=stream.tell() // _TOKEN_DTYPE.itemsize)
        temporary[1].write_bytes(encode_index(np.array(lengths, dtype=np.int64)))
        # The index goes first and comes last: a reader that finds one finds its own tokens beside it.
        index_file.unlink(missing_ok=True)
        temporary[0].replace(tokens_file)
        temporary[1].replace(index_file)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    return len(lengths), sum(lengths)


def encode_index(lengths: np.ndarray) -> bytes:
    """The .idx file of documents of `lengths` tokens."""
    offsets = (np.cumsum(lengths) - lengths) * _TOKEN_DTYPE.itemsize
    boundaries = np.arange(len(lengths) + 1)
    return b"".join(
        (
            _MAGIC,
            struct.pack("<QBQQ", _VERSION, _UINT16_CODE, len(lengths), len(boundaries)),
            lengths.astype("<i4").tobytes(),
            offsets.astype("<i8").tobytes(),
            boundaries.astype("<i8").tobytes(),
        )
    )


def show_progress(num_done: int, num_expected: int, *, sum_tokens: int) -> None:
    """A line that rewrites itself on a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(
            f"\r{num_done}/{num_expected} files, {sum_tokens:,} tokens", end="", file=sys.stderr, flush=True
        )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; `max_mb` is in units of a million bytes of text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", type=Path, help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--max-mb", type=float, default=16.0, help="million bytes of text at most (16)")
    parser.add_argument(
        "--source", type=Path, help="a folder of Python files instead of the standard library"
    )
    arguments = parser.parse_args(argv)
    if not arguments.max_mb > 0:
        parser.error(f"--max-mb is {arguments.max_mb}: it must be above 0")
    if not arguments.prefix.name:
        parser.error(f"PREFIX is {arguments.prefix}: it must end with a file name, such as data/stdlib")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Prepare the dataset; returns 0, or 1 after one line on what went wrong."""
    arguments = parse_arguments(argv)
    try:
        sources = find_sources(arguments.source or Path(sysconfig.get_paths()["stdlib"]))
        documents = read_documents(sources, max_bytes=int(arguments.max_mb * 1e6))
        num_documents, num_tokens = write_dataset(arguments.prefix, documents, num_expected=len(sources))
        digest = hashlib.sha256(arguments.prefix.with_name(arguments.prefix.name + ".bin").read_bytes())
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if num_documents < _FEWEST_DOCUMENTS_TO_SPLIT:
        print(
            f"warning: {num_documents} files: Megatron hangs on a part of --split that gets none; "
            "give --split 100,0,0 to train, or a larger --max-mb here",
            file=sys.stderr,
        )
    print(
        f"{arguments.prefix}: {num_documents} files, {num_tokens:,} tokens, sha256 {digest.hexdigest()[:16]}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
