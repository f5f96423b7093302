"""Start settings of a revision's workers."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tandem.controlplane.bundled import bundled_model
from tandem.controlplane.environment import Environment
from tandem.controlplane.resolve import resolve
from tandem.controlplane.revisions import Revised, revised
from tandem.core.config import ClusterConfig, WorkerSection
from tandem.core.desired import Revision
from tandem.core.errors import ConfigError, ModelError, StartupError
from tandem.core.lifecycle import RoleName

ENVIRONMENT = Environment(state_root=Path("/none"), socket_root=Path("/tmp"), cores=8, variables={})
RESOLVED = resolve(ClusterConfig(worker=WorkerSection(engine="sim")), ENVIRONMENT)


def started(revision: Revision | None) -> Revised:
    return revised(RESOLVED, RESOLVED.models[0], RoleName.DECODE, revision, ENVIRONMENT.cores)


def of(path: str = "", **settings: str) -> Revision:
    spelled = {key.replace("__", "."): value for key, value in settings.items()}
    return Revision(name="r2", model="tandem-tiny", model_path=path, settings=spelled)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(bundled_model(), tmp_path / "next")
    return tmp_path / "next"


def test_without_one_it_is_the_configuration() -> None:
    assert started(None) == Revised(source=RESOLVED.models[0].source, settings=RESOLVED.workers[RoleName.DECODE])
    assert started(of()) == started(None)


def test_settings_and_files(folder: Path) -> None:
    found = started(of(str(folder), worker__chunk_tokens="64", decode__block_tokens="8", prefill__block_tokens="32"))
    assert (found.settings.chunk_tokens, found.settings.block_tokens) == (64, 8)
    assert found.settings.threads == RESOLVED.workers[RoleName.DECODE].threads
    assert (found.source.name, found.source.path, found.source.commit) == ("tandem-tiny", folder, "")


def test_a_path_that_cannot_be_looked_up_is_no_model() -> None:
    with pytest.raises(ModelError, match=f"cannot load the model {'n' * 80}: .*File name too long"):
        started(of("n" * 300))
    with pytest.raises(ConfigError, match="cannot find ~nosuchuser/m: ~nosuchuser is nobody's home"):
        started(of("~nosuchuser/m"))


def test_a_folder_that_may_not_be_read_is_no_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", stat)  # the account that runs the tests may read everything
    with pytest.raises(ModelError, match="Permission denied"):
        started(of(str(folder)))


def test_what_cannot_be_started_is_refused(folder: Path) -> None:
    other = folder / "tokenizer.json"
    other.write_text(json.dumps({**json.loads(other.read_text()), "version": "2.0"}))
    wrong = {
        "no such folder": of("/no/such"),
        "another tokenizer": of(str(folder)),
        "Use one of auto": of(worker__transport="pigeon"),
        "is no setting of workers": of(worker__moons="2"),
    }
    for message, revision in wrong.items():
        with pytest.raises(StartupError) as refused:
            started(revision)
        assert message.lower() in refused.value.message.lower()
