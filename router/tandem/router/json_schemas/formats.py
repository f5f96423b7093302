"""Patterns of formats that llguidance does not know."""

from __future__ import annotations

_UNRESERVED = r"[A-Za-z0-9._~!$&'()*+,;=:@/-]"
_ESCAPE = "%[0-9A-Fa-f]{2}"
_PATH = f"(?:{_UNRESERVED}|{_ESCAPE})*"
_REST = rf"(?:\?(?:{_UNRESERVED}|\?|{_ESCAPE})*)?(?:#(?:{_UNRESERVED}|\?|{_ESCAPE})*)?"
_NAME = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+(?:\.(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+)*"
_VARIABLE = rf"{_NAME}(?:\*|:[1-9][0-9]{{0,3}})?"
_VERSION_PART = "(?:0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*"

FORMAT_PATTERNS = {
    "byte": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "url": rf"^(?:https?|ftp)://{_HOST}(?::[0-9]{{1,5}})?(?:/{_PATH})?{_REST}$",
    "uri-reference": (
        rf"^(?:[A-Za-z][A-Za-z0-9+.-]*:)?(?://{_HOST}(?::[0-9]{{1,5}})?(?:/{_PATH})?"
        rf"|/?|/?(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_ESCAPE})+(?:/{_PATH})?){_REST}$"
    ),
    "uri-template": (
        r"^(?:[!#$&(-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{2}"
        rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"
    ),
    "semver": (
        r"^(?:0|[1-9][0-9]*)\.(?:0|[1-9][0-9]*)\.(?:0|[1-9][0-9]*)"
        rf"(?:-{_VERSION_PART}(?:\.{_VERSION_PART})*)?(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?$"
    ),
    "json-pointer": r"^(?:/(?:[^/~]|~[01])*)*$",
}
"""A text that fits a pattern fits its format: base64 of RFC 4648, URLs and URI references of RFC 3986 with the name or
IPv4 address of a host, templates of RFC 6570, versions of semver.org, pointers of RFC 6901."""
