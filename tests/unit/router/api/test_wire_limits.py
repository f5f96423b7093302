"""Test limits of gRPC messages and of multipart forms, as counted on the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import InvalidRequestError, MediaTypeError
from tandem.router.api.grpc_auth import MAX_FIELDS, check_wire
from tandem.router.api.http.multipart import MultipartForm, boundary_of
from tandem.rpc.v1 import inference_pb2 as i

GENERATE = i.GenerateRequest.DESCRIPTOR
VALUES = 1000


def nested(field: int, inner: bytes) -> bytes:
    size, length = len(inner), b""
    while size > 0x7F:
        size, length = size >> 7, length + bytes([size & 0x7F | 0x80])
    return bytes([field << 3 | 2]) + length + bytes([size]) + inner


CHAT = [i.ChatMessage(role="user", content="a", parts=["b"])]
EMPTY_MESSAGES = nested(4, nested(1, b"") * (MAX_FIELDS + 1))


def test_what_is_honest_is_let_through() -> None:
    request = i.GenerateRequest(
        model="m",
        chat=i.ChatMessages(messages=CHAT * 8192),
        sampling=i.GenerateSampling(temperature=1, seed=-1, logit_bias={7: 2.5}, stop_token_ids=range(64)),
        stop=["a"] * 16,
        priority=-1,
    )
    check_wire(request.SerializeToString(), GENERATE, VALUES)
    ids = i.GenerateRequest(token_ids=i.TokenIds(ids=[2**32 - 1, 1] * (VALUES // 2)))
    check_wire(ids.SerializeToString(), GENERATE, VALUES)


@pytest.mark.parametrize(
    "raw",
    [
        EMPTY_MESSAGES,
        b"\x0b" + EMPTY_MESSAGES,  # behind the start of a group
        EMPTY_MESSAGES + b"\x07",  # before a broken field
        EMPTY_MESSAGES + nested(4, b"\x07"),
        EMPTY_MESSAGES[:-1],
        nested(4, b"\x1a\x00" * (MAX_FIELDS + 1)),
        nested(6, b"") * (MAX_FIELDS + 1),
        nested(5, nested(13, b"") * (MAX_FIELDS + 1)),
        nested(3, b"\x08\x01" * (MAX_FIELDS + 1)),  # not packed
        b"\x98\x06\x01" * (MAX_FIELDS + 1),  # of a number that we do not know
    ],
)
def test_more_fields_than_a_message_may_have_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=f"too many fields: at most {MAX_FIELDS}"):
        check_wire(raw, GENERATE, VALUES)


@pytest.mark.parametrize("field", [nested(3, nested(1, b"\x01" * 1001)), nested(5, nested(19, b"\x01" * 1001))])
def test_more_values_than_a_message_may_have_are_refused(field: bytes) -> None:
    if field.startswith(nested(5, b"")[:1]):
        field = nested(5, nested(11, b"\x01" * 600) + nested(11, b"\x80\x01" * 401))
    with pytest.raises(InvalidRequestError, match="too many values: at most 1000"):
        check_wire(field, GENERATE, VALUES)


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\x12\xff", b"\xff" * 100, b"\x0e"])
def test_what_is_broken_is_left_to_the_decoder(raw: bytes) -> None:
    check_wire(raw, GENERATE, VALUES)


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
