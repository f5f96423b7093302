"""Locates a model's files and identifies them. Imports no torch, so that any process may use it.

A local folder or GGUF file is taken as it is; anything else is a hub id that huggingface_hub fetches into its cache.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import ModelError
from tandem.core.files import expand_user, unwritable
from tandem.core.gguf.model_files import GgufModel, folder_of, gguf_files, gguf_in, is_gguf, model_name
from tandem.core.kv_compatibility import Fingerprint
from tandem.engine.model_config import ModelConfig

INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt",
)  # fmt: skip
HUB_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
"""Files fetched from the hub: never a pickled weight, never code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model on disk. `name` is the hub id or the name of folder or file; `commit` is the hub commit, else empty.

    `path` is a folder, or a GGUF file, the first one where there are several.
    """

    name: str
    path: Path
    commit: str = ""


def resolve_model(model: str, *, revision: str = "", has_weights: bool = True) -> ModelSource:
    """Find `model`: a folder or GGUF file if one exists under that path, else a hub id at `revision` (a branch, tag or
    commit).

    May download, weights only if the model `has_weights` to be computed with. Raises ModelError in one line when that
    fails, also offline.
    """
    found = local_model(model, revision=revision)
    if found is not None:
        return found
    path = _download(model, revision, [*HUB_PATTERNS] if has_weights else [*HUB_PATTERNS[1:]])
    return ModelSource(name=model, path=path, commit=path.name)


def local_model(model: str, *, revision: str = "") -> ModelSource | None:
    """The folder or GGUF file `model`; None for a hub id, which nothing is asked about. ModelError for what is neither.

    A folder with one GGUF model and no safetensors is that model.
    """
    folder = expand_user(model)
    if why := unwritable(folder):
        raise _unwritable(folder, why)
    if folder.is_dir() or (folder.is_file() and is_gguf(folder)):
        if revision:
            raise ModelError(
                f"{model} is a {'folder' if folder.is_dir() else 'file'} and has no revisions",
                why=f"revision {revision} was asked for", todo="leave the revision out, or name a hub id",
            )  # fmt: skip
        return _found(folder)
    if folder.is_absolute() or model.startswith(("./", "../", "~")) or folder.is_file():
        why = "it is a file, and not GGUF" if folder.is_file() else "no such folder or file"
        todo = "give a folder, a GGUF file or a hub id such as owner/name"
        raise ModelError(f"cannot load the model {model}", why=why, todo=todo)
    return None


def fingerprint(
    source: ModelSource, config: ModelConfig, *, compute_dtype: str, weight_quantisation: str = "none"
) -> Fingerprint:
    """Return the identity that two workers must share to exchange KV. Reads every weight byte of a local folder once.

    Raises ModelError if a file cannot be read.
    """
    tokenizer = tokenizer_digest(source.path)
    revision = source.commit
    if not revision:
        about = [] if is_gguf(source.path) else ["config.json", *_present(source.path, (INDEX_NAME,))]
        revision = _digest(folder_of(source.path), [*about, *weight_files(source.path)], tokenizer)
    return Fingerprint(
        model=source.name, revision=revision, rope=config.describe_rope(), adapter="",
        weight_quantisation=weight_quantisation, compute_dtype=compute_dtype, tokenizer=tokenizer,
    )  # fmt: skip


def sim_fingerprint(source: ModelSource, config: ModelConfig) -> Fingerprint:
    """Return the identity that two simulated engines must share to exchange KV: config and tokenizer. It matches no
    computed model.

    Raises ModelError if a file cannot be read.
    """
    tokenizer = tokenizer_digest(source.path)
    if is_gguf(source.path):
        revision = _digest(source.path.parent, [], GgufModel(source.path).metadata.digest(), tokenizer)
    else:
        revision = _digest(source.path, ["config.json"], tokenizer)
    return Fingerprint(
        model=source.name, revision=revision, rope=config.describe_rope(), adapter="", weight_quantisation="none",
        compute_dtype="sim", tokenizer=tokenizer,
    )  # fmt: skip


def tokenizer_digest(path: Path) -> str:
    """Digest that two models must share to read the same token ids. Raises ModelError if a file cannot be read.

    `path` as of a `ModelSource`. A GGUF file has a tokenizer of its own, unless a `tokenizer.json` is beside it.
    """
    folder = folder_of(path)
    if is_gguf(path) and not (folder / "tokenizer.json").is_file():
        return GgufModel(path).metadata.digest("tokenizer.")
    return _digest(folder, _present(folder, TOKENIZER_FILES))


def weight_files(model_dir: Path) -> list[str]:
    """Names of the safetensors files of the checkpoint in `model_dir`, sorted, or of the files of a GGUF model; raises
    ModelError if there are none."""
    if is_gguf(model_dir):
        return [path.name for path in gguf_files(model_dir)]
    index = model_dir / INDEX_NAME
    if index.exists():
        return _indexed_files(index)
    found = sorted(path.name for path in model_dir.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if len(found) == 1:
        return found
    if found:
        raise ModelError(
            f"{model_dir} has {len(found)} safetensors files and no {INDEX_NAME}", todo="download the model again"
        )
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in model_dir.glob(pattern))
    raise ModelError(
        f"{model_dir} has no safetensors weights",
        why=f"{pickled[0]} is pickled, and loading it could run any code" if pickled else "",
        todo="convert it to safetensors" if pickled else "give a folder with model.safetensors",
    )


def _unwritable(path: Path, why: str) -> ModelError:
    return ModelError(f"cannot load the model {str(path)!a}", why=why, todo="rename it")


def _found(path: Path) -> ModelSource:
    """The folder or GGUF file at `path`. A file keeps its own name: in caches it links to one with a meaningless name.
    Raises ModelError for a path that cannot be passed to another process."""
    file = path if path.is_file() else None
    if file is None and not any(path.glob("*.safetensors")):
        file = gguf_in(path)
    found = path.resolve() if file is None else file.parent.resolve() / file.name
    if why := unwritable(found):  # it may be the target of a link, or the working directory
        raise _unwritable(found, why)
    return ModelSource(name=found.name if file is None else model_name(file), path=found)


def _indexed_files(index: Path) -> list[str]:
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{index} cannot be read", why=repr(error), todo="download the model again") from error
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index} names a file outside its folder", why=name, todo="download the model again")
        if not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name}", why="only safetensors are loaded", todo="convert the weights")
    if not names:
        raise ModelError(f"{index} names no files", todo="download the model again")
    return sorted(names)


def _download(model: str, revision: str, patterns: list[str]) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelError(
            f"{model} is no folder here", why="fetching it needs the huggingface_hub package",
            todo="install it, or give a folder",
        ) from error  # fmt: skip
    # The HTTP client's own errors differ between releases of the hub library; all are bases of HfHubHTTPError.
    failures: tuple[type[Exception], ...] = (OSError, ValueError, errors.EntryNotFoundError)
    failures += errors.HfHubHTTPError.__bases__
    try:
        path = huggingface_hub.snapshot_download(model, revision=revision or None, allow_patterns=patterns)
    except failures as error:
        lines = str(error).strip().splitlines()
        raise ModelError(
            f"{model} is no folder here and cannot be fetched from the hub" + (f" at {revision}" if revision else ""),
            why=f"{type(error).__name__}: {lines[0] if lines else 'no details'}",
            todo="check the name, the network and access rights, or give a folder",
        ) from error
    return Path(path)


def _present(folder: Path, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if (folder / name).is_file()]


def _digest(folder: Path, names: list[str], *parts: str) -> str:
    """32 hex characters over the names and bytes of the files, in the order given, and over `parts`."""
    total = hashlib.sha256()
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise ModelError(f"cannot read {folder / name}", why=str(error), todo="download the model again") from error
        total.update(len(name).to_bytes(4, "little") + name.encode() + content)
    for part in parts:
        total.update(len(part).to_bytes(4, "little") + part.encode())
    return total.hexdigest()[:32]
