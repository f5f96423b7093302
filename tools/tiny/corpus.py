"""Makes the training documents of the bundled model from the standard library and its documentation.

Two sources, both under the PSF licence: the docstrings of the running interpreter's ``Lib`` folder (parsed, never
imported) and the reST sources of the Python documentation. The same inputs and seed give the same documents.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tiny import rst

Chat = list[dict[str, str]]

_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "turtledemo", "ensurepip"}
_SKIPPED_DOCS = {"bugs.rst.txt", "contents.rst.txt"}
_QUESTIONS = (
    "What does {name} do?", "What is {name}?", "Explain {name}.", "How does {name} work?", "Describe {name}.",
    "Tell me about {name}.", "What does {name} do in Python?", "Can you explain {name}?", "what is {name} for",
    "How do I use {name}?", "Write a docstring for {name}.", "Document {name} for me, please.",
)  # fmt: skip
_SYSTEM = ("You are a helpful assistant.", "You answer questions about the Python standard library.", "Be brief.",
           "You are a helpful assistant that explains Python.")  # fmt: skip
_ABOUT = (
    ("Hello", "Hello! Ask me about a function of the Python standard library."),
    ("Hello!", "Hello! Ask me about a module or a function of the Python standard library."),
    ("Hi", "Hello! What would you like to know about the Python standard library?"),
    ("Who are you?", "I am tandem-tiny, a very small language model trained on the Python documentation. I write in "
                     "its style, but I know nothing for certain."),
    ("What are you?", "I am tandem-tiny, a very small language model. I was trained on the Python documentation."),
    ("What can you do?", "I write short texts in the style of the Python documentation. Do not rely on what they say."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Plain documents and conversations, split by a hash of their name so that the split never moves."""

    texts: list[str]
    chats: list[Chat]
    heldout_texts: list[str]

    def describe(self) -> str:
        """One line of counts for the log and the model card."""
        return (
            f"{len(self.texts):,} documents ({sum(map(len, self.texts)) / 1e6:.1f} M characters), "
            f"{len(self.chats):,} conversations, {len(self.heldout_texts):,} documents held out"
        )


class DocsNotFoundError(Exception):
    """The ``--docs`` folder holds no reST sources of the Python documentation."""


def build(docs: Path | None, seed: int) -> Corpus:
    """The whole corpus. ``docs`` is a folder with ``*.rst`` or ``*.rst.txt`` files somewhere below; None leaves it out.

    Raises:
        DocsNotFoundError: ``docs`` does not exist or holds no such file.
    """
    named_texts: list[tuple[str, str]] = []
    answers: list[tuple[str, str]] = []
    for module, docstrings in _library_docstrings(Path(sysconfig.get_path("stdlib"))):
        named_texts.append((f"docstrings/{module}", _module_document(module, docstrings)))
        if not is_held_out(f"docstrings/{module}"):
            answers += [(name, rst.first_paragraphs(text, 700)) for name, _, text in docstrings]
    if docs is not None:
        for path, source in _documentation(docs):
            named_texts.append((f"docs/{path}", rst.plain_text(source)))
            if not is_held_out(f"docs/{path}"):
                answers += [(e.name, rst.first_paragraphs(e.body, 700)) for e in rst.entries(source)]
    rng = random.Random(seed)
    chats = _conversations([(n, a) for n, a in answers if 20 <= len(a) <= 1500], rng)
    texts = [text for name, text in named_texts if len(text) > 80 and not is_held_out(name)]
    heldout = [text for name, text in named_texts if len(text) > 80 and is_held_out(name)]
    rng.shuffle(texts)
    return Corpus(texts=texts, chats=chats, heldout_texts=heldout)


def heldout_docstrings() -> list[str]:
    """Of the documents that are held out, those from the running interpreter's library: the same without ``--docs``."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = _library_docstrings(root, lambda module: is_held_out(f"docstrings/{module}"))
    documents = [_module_document(module, docstrings) for module, docstrings in modules]
    return [document for document in documents if len(document) > 80]


def is_held_out(name: str) -> bool:
    """About one document in forty, chosen by the hash of its name."""
    return hashlib.sha256(name.encode()).digest()[0] < 256 // 40


def _library_docstrings(
    root: Path, is_wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """For each module that is wanted: its dotted name and (qualified name, signature, docstring) of all it defines."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS & set(parts) or parts[-1].startswith("test_"):
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not is_wanted(module):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # the library ships a few deliberately broken files
            continue
        found = list(_docstrings(tree, module, module))
        if found:
            yield module, found


def _docstrings(node: ast.AST, name: str, signature: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and len(text) > 15:
            yield name, signature, inspect.cleandoc(text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}", f"def {child.name}({ast.unparse(child.args)}):")
        elif isinstance(child, ast.ClassDef):
            bases = ", ".join(ast.unparse(b) for b in child.bases)
            yield from _docstrings(child, f"{name}.{child.name}", f"class {child.name}({bases}):".replace("()", ""))


def _module_document(module: str, docstrings: list[tuple[str, str, str]]) -> str:
    parts = [f"# {module}"]
    for name, signature, text in docstrings:
        if name == module:
            parts.append(text)
        else:
            body = "\n".join(f"    {line}".rstrip() for line in f'"""{text}"""'.splitlines())
            parts.append(f"{signature}\n{body}")
    return "\n\n".join(parts)


def _documentation(docs: Path) -> Iterator[tuple[str, str]]:
    paths = sorted(p for pattern in ("*.rst", "*.rst.txt") for p in docs.rglob(pattern))
    paths = [p for p in paths if p.name not in _SKIPPED_DOCS]
    if not paths:
        raise DocsNotFoundError(
            f"no *.rst or *.rst.txt files under {docs}: unpack the python3.11-doc package there "
            "(apt-get download python3.11-doc; dpkg -x python3.11-doc_*.deb DIR), or pass --no-docs"
        )
    for path in paths:
        yield "/".join(path.parts[-2:]), path.read_text(encoding="utf-8", errors="replace")


def _conversations(answers: list[tuple[str, str]], rng: random.Random) -> list[Chat]:
    """Each answer asked for once, in conversations of one to four turns; a few about the model itself between."""
    rng.shuffle(answers)
    chats: list[Chat] = []
    while answers:
        chat: Chat = []
        if rng.random() < 0.25:
            chat.append({"role": "system", "content": rng.choice(_SYSTEM)})
        if rng.random() < 0.04:
            question, reply = rng.choice(_ABOUT)
            chat += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
            if answers:
                name, reply = answers.pop()
                chat.append({"role": "user", "content": _question(name, rng)})
                chat.append({"role": "assistant", "content": reply})
        chats.append(chat)
    return chats


def _question(name: str, rng: random.Random) -> str:
    parts = name.split(".")
    # People rarely write the whole path of a method: half the time the last one or two names alone.
    short = ".".join(parts[-rng.choice((1, 2)) :]) if rng.random() < 0.5 else name
    short = re.sub(r"^(\w+)\.__init__$", r"\1", short)
    return rng.choice(_QUESTIONS).format(name=short)
