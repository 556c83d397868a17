"""Files: their lines, compressed or not, and writing that leaves the old or the new and nothing between."""

import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, unpacked if its name ends in .gz; ValueError where that does not work."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: broken gzip file ({error}); fetch or compress it again") from error


def lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """(file:line, text) of each line of a UTF-8 file, gzipped or not; byte order marks are skipped.

    ValueError names the line that is not UTF-8.
    """
    # Cut at \n in bytes, decoded line by line, so that a line that is not UTF-8 can be named.
    with reading(Path(path)) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode().removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8 ({error.reason}); convert the file") from error
            yield f"{path}:{number}", text


def json_lines(path: str | Path) -> Iterator[tuple[str, Any]]:
    """(file:line, value) of each line that is not blank, one JSON value a line."""
    for place, line in lines(path):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: expected an object in JSON on one line: {error}") from None
            yield place, value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of `path` in one step when the block ends well; else it is removed.

    OSError that says what stays when the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.umask(umask := os.umask(0))  # the only way to read it
        temporary.chmod(0o666 & ~umask)  # safetensors writes files that only their owner may read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name == "posix":  # the folder's entry as well
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except (OSError, SafetensorError) as error:
        stays = "the old file stays as it was" if path.exists() else "there is none now"
        raise OSError(f"cannot write {path} ({error}): {stays}; make room or choose another place") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: str | Path) -> Iterator[Path]:
    """A new folder to fill beside `folder`, which takes its place at the end, or is gone after an error."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield new
        for path in new.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            os.replace(folder, old)
            shutil.rmtree(old)
        new.chmod(0o755)
        os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
