"""Turns the reST sources of the Python documentation into plain prose, and picks out the text of each entry.

Owns text clean-up only: reads no files and knows no tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_DROP_BLOCK = {
    "index", "toctree", "image", "figure", "only", "sectionauthor", "moduleauthor", "highlight", "include",
    "literalinclude", "testsetup", "testcleanup", "tabularcolumns", "audit-event-table", "impl-detail", "raw",
    "opcode-table", "contents", "rubric", "centered", "cssclass", "productionlist", "availability", "audit-event",
}  # fmt: skip
_DROP_LINE = {"code-block", "sourcecode", "testcode", "testoutput", "doctest", "parsed-literal", "module", "topic",
              "currentmodule", "table", "list-table", "hlist", "glossary", "describe", "class-like"}  # fmt: skip
_ADMONITIONS = {"note": "Note:", "warning": "Warning:", "seealso": "See also:", "tip": "Tip:", "important": "Note:"}
_ENTRIES = {"function", "class", "method", "attribute", "data", "exception", "decorator", "classmethod",
            "staticmethod", "coroutinefunction", "coroutinemethod", "awaitablefunction", "c:function", "c:type",
            "c:macro", "c:var", "opcode", "option", "envvar", "cmdoption", "abstractmethod"}  # fmt: skip

_DIRECTIVE = re.compile(r"^(\s*)\.\. ([\w:-]+)::\s*(.*)$")
_ROLE = re.compile(r":([\w:-]+):`([^`]+)`")
_UNDERLINE = re.compile(r"^([=*\-^~\"'#+])\1{2,}\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One documented name: ``name`` is qualified with its module, ``signature`` keeps its arguments."""

    kind: str
    name: str
    signature: str
    body: str


def plain_text(source: str) -> str:
    """The readable text of one reST file: roles and directives resolved to words, layout directives dropped."""
    lines = source.expandtabs(8).splitlines()
    out: list[str] = []
    skip_deeper_than: int | None = None
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if skip_deeper_than is not None:
            if not line.strip() or indent > skip_deeper_than:
                continue
            skip_deeper_than = None
        if _UNDERLINE.match(line):
            _mark_heading(out, lines[i + 1] if i + 1 < len(lines) else "", line)
            continue
        match = _DIRECTIVE.match(line)
        if match:
            text = _directive_text(match[1], match[2], match[3])
            if text is None:
                skip_deeper_than = indent
            elif text:
                out.append(text)
            continue
        if line.lstrip().startswith(".. ") or line.strip() == "..":
            skip_deeper_than = indent
            continue
        if re.match(r"^\s+:[\w-]+:(\s.*)?$", line):
            continue
        out.append(_inline(line.rstrip()))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def entries(source: str) -> list[Entry]:
    """Every documented function, class, method and the like, with the first paragraphs of its description."""
    found: list[Entry] = []
    module = ""
    lines = source.expandtabs(8).splitlines()
    for i, line in enumerate(lines):
        match = _DIRECTIVE.match(line)
        if not match:
            continue
        indent, kind, argument = match.groups()
        if kind in ("module", "currentmodule"):
            module = argument.strip()
        elif kind in _ENTRIES:
            body = plain_text(_block_below(lines, i + 1, len(indent)))
            name = re.split(r"[(\s]", argument.strip(), maxsplit=1)[0].lstrip("@")
            if body and name:
                prefix = f"{module}." if module and not kind.startswith("c:") and kind not in _UNQUALIFIED else ""
                signature = argument.strip().replace("\\", "")
                found.append(Entry(kind=kind, name=prefix + name, signature=prefix + signature, body=body))
    return found


def first_paragraphs(text: str, limit_chars: int) -> str:
    """Whole paragraphs from the start of ``text`` while they fit; at least the first."""
    kept: list[str] = []
    size = 0
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if kept and size + len(paragraph) > limit_chars:
            break
        kept.append(paragraph.rstrip())
        size += len(paragraph) + 2
    return "\n\n".join(kept).rstrip(" :")


_UNQUALIFIED = {"opcode", "option", "envvar", "cmdoption"}


def _block_below(lines: list[str], start: int, indent: int) -> str:
    block: list[str] = []
    for line in lines[start:]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        if _DIRECTIVE.match(line) and _DIRECTIVE.match(line)[2] in _ENTRIES:  # type: ignore[index]
            break
        block.append(line)
    width = min((len(x) - len(x.lstrip()) for x in block if x.strip()), default=0)
    # Signatures that go on below the directive are aligned with its argument, far to the right of the body.
    return "\n".join(x[width:] for x in block)


def _mark_heading(out: list[str], following: str, underline: str) -> None:
    if out and out[-1].strip() and not out[-1].startswith(("#", " ")) and len(underline.strip()) + 3 >= len(out[-1]):
        out[-1] = ("# " if underline[0] in "=*#" else "## ") + out[-1].replace(" --- ", ": ")


def _directive_text(indent: str, name: str, argument: str) -> str | None:
    """The words a directive becomes; "" to keep only its body, None to drop its body as well."""
    if name in _DROP_BLOCK:
        return None
    if name in _ADMONITIONS:
        return f"{indent}{_ADMONITIONS[name]} {_inline(argument)}".rstrip()
    if name == "versionadded":
        return f"{indent}New in version {_inline(argument)}"
    if name in ("versionchanged", "deprecated", "deprecated-removed"):
        verb = "Changed in" if name == "versionchanged" else "Deprecated since"
        return f"{indent}{verb} version {_inline(argument)}"
    if name in _ENTRIES:
        return f"{indent}{_inline(argument)}"
    return "" if name in _DROP_LINE or not argument else f"{indent}{_inline(argument)}"


def _inline(line: str) -> str:
    line = _ROLE.sub(_role_text, line)
    line = re.sub(r"``([^`]+)``", r"`\1`", line)
    line = re.sub(r"`([^`<]+?)\s*<[^>`]+>`__?", r"\1", line)
    line = re.sub(r"(?<![\w*\\])\*\*([^*\s][^*\n]*?)\*\*(?![\w*])", r"\1", line)
    line = re.sub(r"(?<![\w*\\])\*([A-Za-z_][^*\n]*?)\*(?![\w*])", r"\1", line)
    line = re.sub(r"::\s*$", ":", line) if not re.match(r"^\s*::\s*$", line) else ""
    return re.sub(r"\\([*_`\\])", r"\1", line).replace(" --- ", " - ")


def _role_text(match: re.Match[str]) -> str:
    role, text = match[1], match[2]
    target = re.match(r"^(.*?)\s*<[^>]*>$", text, re.S)
    if target:
        return target[1]
    text = text.removeprefix("!")
    if text.startswith("~"):
        text = text[1:].rsplit(".", 1)[-1]
    if role in ("func", "meth") and not text.endswith(")"):
        text += "()"
    if role == "pep":
        return f"PEP {text}"
    return text if role in ("term", "ref", "dfn") else f"`{text}`" if role in ("mod", "class", "exc") else text
