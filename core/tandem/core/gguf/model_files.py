"""The one or several GGUF files of a model, found and read as one.

A model of several is NAME-00001-of-0000N.gguf and so on: the first has the metadata, each has tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from tandem.core.errors import ModelError
from tandem.core.gguf.file import GgufFile, StoredTensor
from tandem.core.gguf.metadata import Metadata

SUFFIX = ".gguf"
MAX_FILES = 1 << 10
_SPLIT = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)


def is_gguf(path: Path) -> bool:
    """True if a model's path is a GGUF file; else it is a folder."""
    return path.suffix == SUFFIX and not path.is_dir()


def model_name(path: Path) -> str:
    """Return the name of a file's model: the file's name without suffix and number."""
    split = _SPLIT.fullmatch(path.name)
    return split["name"] if split else path.stem


def gguf_in(folder: Path) -> Path | None:
    """The one GGUF model in `folder`, by its first file; None without one. ModelError for several."""
    names = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    splits = {name: _SPLIT.fullmatch(name) for name in names}
    firsts = [name for name, split in splits.items() if split is None or int(split["number"]) == 1]
    if len(firsts) > 1:
        raise ModelError(
            f"{folder} has {len(firsts)} GGUF models", why=", ".join(firsts[:3]) + (" …" if len(firsts) > 3 else ""),
            todo="name the file that is to be served",
        )  # fmt: skip
    if names and not firsts:
        raise ModelError(f"{folder} is not complete", why=f"it has {names[0]} and not the first file of that model")
    return folder / firsts[0] if firsts else None


def folder_of(path: Path) -> Path:
    """Folder of a model's files: a folder itself, or that of a GGUF file."""
    return path.parent if is_gguf(path) else path


def gguf_files(path: Path) -> list[Path]:
    """Return all files of the model that begins with `path`, in order. Raises ModelError if `path` is not the first."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split["count"])
    if int(split["number"]) != 1:
        first = f"{split['name']}-00001-of-{split['count']}{SUFFIX}"
        raise ModelError(f"{path} is not the first file of its model", todo=f"give {first}")
    if not 1 <= count <= MAX_FILES:
        raise ModelError(f"{path} says that it is one of {count} files", why=f"at most {MAX_FILES} are read")
    return [
        path.with_name(f"{split['name']}-{number:05}-of-{split['count']}{SUFFIX}") for number in range(1, count + 1)
    ]


class GgufModel:
    """All files of the model at `path`, mapped: the first one's metadata, and the tensors of all.

    Raises ModelError for files that are missing, wrong, or of different models.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [GgufFile(each) for each in gguf_files(path)]
        first = self.files[0]
        self.metadata: Metadata = first.metadata
        for number, file in enumerate(self.files):
            _check_place(file, number, len(self.files))
        self.file_of: dict[str, GgufFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self.file_of:
                    raise _wrong(file, f"{name} is in {self.file_of[name].path.name}, too")
                self.file_of[name] = file
        total = first.metadata.whole("split.tensors.count", len(self.file_of))
        if total != len(self.file_of):
            raise _wrong(first, f"its model has {total} tensors, and its files have {len(self.file_of)}")

    def tensor(self, name: str) -> StoredTensor:
        """KeyError without one."""
        return self.file_of[name].tensors[name]


def _check_place(file: GgufFile, number: int, count: int) -> None:
    said, of = file.metadata.whole("split.no", 0), file.metadata.whole("split.count", 0) or 1
    if (said, of) != (number, count):
        raise _wrong(file, f"it says that it is number {said} of {of}, its name that it is number {number} of {count}")


def _wrong(file: GgufFile, why: str) -> ModelError:
    todo = "keep the names that the files were published under, and download them again"
    return ModelError(f"{file.path} does not belong to its model", why=why, todo=todo)
