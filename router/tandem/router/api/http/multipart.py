"""Reads the form of an upload as it arrives: short fields are kept, the bytes of the file are handed on at once."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tandem.core.errors import InvalidRequestError, MediaTypeError
from tandem.router.error_quoting import quoted, shortened

FILE_FIELD = "file"
_MAX_FIELD_BYTES = 4096
_MAX_PARTS = 16
_MAX_HEADER_BYTES = 2048


def boundary_of(content_type: str) -> bytes:
    """Return the separator of the parts; MediaTypeError when the request is no form."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise MediaTypeError(
            f"the Content-Type is {quoted(content_type)}", todo="send multipart/form-data", param="content-type"
        )
    return boundary


class MultipartForm:
    """One form. Feed it the bytes that arrive; every complaint is an InvalidRequestError."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        """As the client gave it, once the file's part has begun."""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )
        self._parts = 0
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._data = bytearray()
        self._file: list[bytes] = []
        self._is_whole = False

    def feed(self, data: bytes) -> bytes:
        """Take what arrived; returns the bytes of the file in it."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError("the form cannot be read", why=str(error)) from error
        taken, self._file = b"".join(self._file), []
        return taken

    def finish(self) -> None:
        """Nothing more arrives; InvalidRequestError when something is missing."""
        if not self._is_whole:
            raise InvalidRequestError("the form is not complete", why="its last boundary is missing")
        if self.file_name is None:
            raise InvalidRequestError(
                "the form has no file", todo="send the file as the field 'file'", param=FILE_FIELD
            )

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise InvalidRequestError("the form has too many parts", why=f"at most {_MAX_PARTS} are allowed")
        self._disposition, self._name, self._is_file = b"", "", False
        self._data.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._check_header()

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._header) + len(self._value) > _MAX_HEADER_BYTES:
            raise InvalidRequestError("a part of the form has too long a header")

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self.fields or (self._name == FILE_FIELD and self.file_name is not None):
            raise InvalidRequestError(f"{shortened(self._name)} is given twice", param=shortened(self._name))
        if self._name == FILE_FIELD:
            if b"filename" not in options:
                raise InvalidRequestError("file has no file name", todo="upload it as a file", param=FILE_FIELD)
            self._is_file = True
            self.file_name = options[b"filename"].decode("utf-8", "replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file.append(data[start:end])
            return
        self._data += data[start:end]
        if len(self._data) > _MAX_FIELD_BYTES:
            raise InvalidRequestError(f"{shortened(self._name)} is too long", param=shortened(self._name))

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._data.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._is_whole = True
