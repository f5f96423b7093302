"""Keys are drawn, recognised and checked without the key itself being kept anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.core.api_keys import KeyWish, Scope, draw, id_of
from tandem.core.errors import InvalidRequestError

WISH = KeyWish(tenant="acme", scopes=(Scope.INFER, Scope.METRICS), lifetime_s=60, slo="fast", priority=-3, name="Ann's")


def test_a_key_opens_and_is_not_kept() -> None:
    text, key = draw(WISH, 1000.4)
    assert key.is_opened_by(text)
    assert id_of(text) == key.id
    assert text.startswith(f"{key.shown}-")
    assert len(text) > 50
    assert text.partition(f"{key.shown}-")[2] not in repr(key)
    assert (key.tenant, key.scopes, key.slo, key.priority, key.name) == ("acme", WISH.scopes, "fast", -3, "Ann's")
    assert (key.created_s, key.expires_s) == (1000, 1060)


def test_no_two_keys_are_alike() -> None:
    drawn = [draw(WISH, 0) for _ in range(50)]
    assert len({text for text, _ in drawn}) == len({key.id for _, key in drawn}) == 50
    (text, _), (_, other) = drawn[:2]
    assert not other.is_opened_by(text)


@given(at=st.integers(0, 200), place=st.integers(0, 10**6), new=st.characters())
@example(at=0, place=0, new="\ud800")
def test_any_other_text_does_not_open(at: int, place: int, new: str) -> None:
    text, key = draw(WISH, at)
    place %= len(text)
    wrong = text[:place] + new + text[place + 1 :]
    assert key.is_opened_by(wrong) == (wrong == text)


def test_it_expires_at_its_second() -> None:
    _, key = draw(WISH, 1000)
    assert not key.is_expired(1059.9)
    assert key.is_expired(1060)
    _, forever = draw(replace(WISH, lifetime_s=0), 1000)
    assert not forever.is_expired(1e12)


@pytest.mark.parametrize("text", ["", "none", "sk-proj-abc", "tdk-0123", "tdk-0123456789ab-short", "tdk-" + "é" * 60])
def test_what_is_no_key_of_ours(text: str) -> None:
    assert id_of(text) is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": "x" * 65}, "tenant"),
        ({"tenant": "anonymous"}, "tenant"),
        ({"scopes": ()}, "scopes"),
        ({"scopes": (Scope.INFER, Scope.INFER)}, "scopes"),
        ({"lifetime_s": -1}, "lifetime_s"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"name": "x" * 201}, "name"),
        ({"name": "a\nb"}, "name"),
    ],
)
def test_wrong_wishes_name_the_field(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        draw(replace(WISH, **change), 0)
    assert caught.value.param == param
