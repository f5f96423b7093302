"""Forms in pieces of any size; every limit; what is no form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import InvalidRequestError, MediaTypeError
from tandem.router.api.http.multipart import MultipartForm, boundary_of

BOUNDARY = "xyz"
CONTENT = b"line one\r\n--xyzz\r\nnot a boundary\n\x00\xff"


def part(name: str, data: bytes, file_name: str | None = None) -> bytes:
    tail = f'; filename="{file_name}"' if file_name is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{tail}\r\n\r\n'
    return head.encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def fed(data: bytes, size: int = 10**9) -> tuple[MultipartForm, bytes]:
    reader = MultipartForm(BOUNDARY.encode())
    taken = b"".join(reader.feed(data[start : start + size]) for start in range(0, len(data), size))
    return reader, taken


@given(st.integers(1, 400))
def test_in_pieces(size: int) -> None:
    whole = form(part("purpose", b"batch"), part("file", CONTENT, "in.jsonl"), part("expires_after[seconds]", b"3600"))
    reader, taken = fed(whole, size)
    reader.finish()
    assert taken == CONTENT
    assert reader.file_name == "in.jsonl"
    assert reader.fields == {"purpose": "batch", "expires_after[seconds]": "3600"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (form(part("file", b"a", "f"), part("file", b"a", "f")), "given twice"),
        (form(part("x", b"a"), part("x", b"a")), "given twice"),
        (form(*(part(f"x{n}", b"") for n in range(17))), "too many parts"),
        (form(part("purpose", b"b" * 5000)), "too long"),
        (form(part("p" * 9000, b"")), "too long a header"),
        (form(part("file", b"a")), "no file name"),
        (b"something else", "cannot be read"),
    ],
)
def test_wrong_forms(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        fed(data, 100)


def test_not_whole() -> None:
    reader, _ = fed(form(part("file", b"a" * 100, "f"))[:-8])
    with pytest.raises(InvalidRequestError, match="not complete"):
        reader.finish()
    reader, _ = fed(form(part("purpose", b"batch")))
    with pytest.raises(InvalidRequestError, match="has no file"):
        reader.finish()


def test_what_is_no_form() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    for kind in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=a"):
        with pytest.raises(MediaTypeError, match="Send multipart"):
            boundary_of(kind)
