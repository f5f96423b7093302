"""The cluster secret: private on disk, never printed, one purpose's answer is no other's."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tandem.core.errors import ConfigError
from tandem.core.secret import ANSWER_BYTES, ClusterSecret

SECRET = ClusterSecret(b"0123456789abcdef")


def test_saved_and_loaded_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = ClusterSecret.generate()
    secret.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterSecret.load(path).derive(b"a") == secret.derive(b"a")
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]


def test_missing_or_short_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ClusterSecret.load(tmp_path / "none")
    short = tmp_path / "short"
    short.write_bytes(b"  0123456789\n")
    with pytest.raises(ConfigError, match="too short"):
        ClusterSecret.load(short)


def test_it_is_never_printed() -> None:
    assert "0123" not in f"{SECRET} {SECRET!r}"


def test_answers_are_checked() -> None:
    other = ClusterSecret(b"fedcba9876543210")
    nonce = b"n" * 32
    answer = SECRET.answer(nonce, b"kv")
    assert len(answer) == ANSWER_BYTES
    assert SECRET.is_answer(nonce, b"kv", answer)
    assert not SECRET.is_answer(nonce, b"control", answer)
    assert not SECRET.is_answer(b"m" * 32, b"kv", answer)
    assert not other.is_answer(nonce, b"kv", answer)
    assert not SECRET.is_answer(nonce, b"kv", b"")


def test_generated_secrets_and_derived_keys_differ() -> None:
    assert ClusterSecret.generate().derive(b"a") != ClusterSecret.generate().derive(b"a")
    assert SECRET.derive(b"a") != SECRET.derive(b"b")
    assert len(SECRET.derive(b"a")) == 32
    assert SECRET.mac(b"a", b"m") not in (SECRET.mac(b"b", b"m"), SECRET.mac(b"a", b"n"), SECRET.derive(b"a").hex())
