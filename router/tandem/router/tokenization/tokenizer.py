"""Text to token ids and back with the model's own tokenizer, as transformers would do it, without transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer as HubTokenizer

from tandem.core.errors import ContextLengthError, InvalidRequestError, ModelError
from tandem.core.gguf.model_files import GgufModel, folder_of, is_gguf
from tandem.core.gguf.tokenizer_json import special_tokens
from tandem.core.memory import return_free_memory
from tandem.router.tokenization.chat_template import (
    DEFAULT_RENDERING,
    LONG_RENDER_S,
    THOUGHT_NAMES,
    ChatTemplate,
    Rendering,
    UnendingTemplateError,
)
from tandem.router.tokenization.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    IncrementalDetokenizer,
    MarkingDetokenizer,
)
from tandem.router.tokenization.gguf_tokenizer import build_tokenizer
from tandem.router.tokenization.template_sandbox import LongText, slices

T = TypeVar("T")
LONG_TEXT_CHARS = 4096
"""Texts at least this long, which take a millisecond, are tokenised in a thread: the event loop has other streams to
feed. The way there and back is 0.05 ms of work, but it waits for the interpreter while other streams are served."""
LONG_TOKENS = 4096
"""So many token ids become text in that thread, too."""
LONG_CHARS = 4
"""A text with more characters than so many times the tokens that are allowed is counted before it is tokenised: that
takes 30 to 150 bytes a character."""
_COUNTED_CHARS = 32_768
"""At a time."""
_MANY_TOKENS = 1 << 18
"""Of one text. To tokenise it took about 150 bytes for each, in small pieces, and the allocator keeps such."""
_SHORT_RENDER_S = 0.02
"""So long a template may take in the event loop, where it takes less than a millisecond."""
_MESSAGE_CHARS = 32
"""Length of a message to be rendered and tokenised beside its content."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Thread-safe after construction. `vocab_size` is the model's, which may exceed the tokenizer's."""

    def __init__(self, hub: HubTokenizer, template: ChatTemplate | None, vocab_size: int, context: int = 0) -> None:
        self._hub = hub
        self._template = template
        self.vocab_size = vocab_size
        self.context_tokens = context
        """Context that the model was made for (`max_position_embeddings`); 0 = unknown."""
        decoder = repr(hub.decoder)
        self._is_byte_level, self._is_all_bytes = "ByteLevel" in decoder, decoder.startswith("ByteLevel(")
        self._bytes: dict[int, bytes] = {}
        self._shown = _ShownBytes(self, {token for token, one in hub.get_added_tokens_decoder().items() if one.special})
        # One thread, so that its cache of words stays warm: the library keeps one a thread.
        self._thread = ThreadPoolExecutor(1, "tokenise")

    @classmethod
    def load(cls, path: Path, template: Path | None = None) -> Tokenizer:
        """Read the tokenizer of a folder or a GGUF file; raises ModelError.

        A folder has tokenizer.json, tokenizer_config.json, chat_template.jinja and config.json; a GGUF file's own
        tokenizer is read where it has no tokenizer.json beside it. `template`: a chat template to use in place of the
        model's.
        """
        folder = folder_of(path)
        gguf = GgufModel(path) if is_gguf(path) else None
        if gguf is not None and not (folder / "tokenizer.json").is_file():
            hub, source, specials = build_tokenizer(gguf.metadata), "", special_tokens(gguf.metadata)
        else:
            settings = _read_json(folder / "tokenizer_config.json")
            hub, source = _read_tokenizer(folder / "tokenizer.json"), _template_source(folder, settings)
            specials = _special_tokens(folder, settings)
        hub.no_padding()
        hub.no_truncation()
        vocab_size, context = _sizes(folder) if gguf is None else _gguf_sizes(gguf)
        if template is not None:
            source = _read_template(template)
        elif gguf is not None:
            source = source or gguf.metadata.text("tokenizer.chat_template")
        chat = ChatTemplate(source, specials) if source else None
        return cls(hub, chat, vocab_size or hub.get_vocab_size(with_added_tokens=True), context)

    def encode_now(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Like `encode`, on the calling thread."""
        return self._encode(text, add_special_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int = 0) -> list[int]:
        """Token ids of `text`, with the special tokens that the model's tokenizer puts around a text.

        ContextLengthError for a long one with clearly more than `most_tokens`, 0 = any number: others may have more.
        """
        if len(text) < LONG_TEXT_CHARS:
            return self._encode(text, add_special_tokens)
        return await self._run(lambda: self._encode_long(text, add_special_tokens, most_tokens, "prompt"))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering = DEFAULT_RENDERING,
        *,
        most_tokens: int = 0,
    ) -> list[int]:
        """Token ids of a rendered chat; the template itself writes the special tokens. `most_tokens` as in `encode`."""
        chars = sum(
            len(str(message.get(name, "")))
            for message in messages
            for name in ("content", THOUGHT_NAMES[0], "tool_calls")
        ) + _MESSAGE_CHARS * len(messages)
        chars += len(str(rendering.tools))
        if chars < LONG_TEXT_CHARS:
            with suppress(UnendingTemplateError):  # the thread has more time
                return self._encode(self.render_chat(messages, rendering, limit_s=_SHORT_RENDER_S), False)
        return await self._run(
            lambda: self._encode_long(self._render_long(messages, rendering), False, most_tokens, "messages")
        )

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering = DEFAULT_RENDERING,
        *,
        limit_s: float = LONG_RENDER_S,
    ) -> str:
        return self._chat_template().render(messages, rendering, limit_s=limit_s)

    def _render_long(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> LongText:
        return self._chat_template().render_long(messages, rendering, limit_s=LONG_RENDER_S)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            why = "its folder has no chat template"
            raise InvalidRequestError("this model cannot chat", why=why, todo="use /v1/completions", param="messages")
        return self._template

    @property
    def chat_source(self) -> str:
        """The chat template as it is written; "" = there is none."""
        return self._template.source if self._template is not None else ""

    @property
    def knows_tools(self) -> bool:
        """True if there is a chat template, and it writes tools or calls of them."""
        return self._template is not None and self._template.knows_tools

    def reads(self, variable: str) -> bool:
        """True if the chat template reads `variable`."""
        return self._template is not None and self._template.reads(variable)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that stand for one text alone, such as tags, with their ids."""
        return {one.content: token for token, one in self._hub.get_added_tokens_decoder().items()}

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._hub.decode(list(tokens), skip_special_tokens=True))

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` with special tokens."""
        return str(self._hub.decode(list(tokens), skip_special_tokens=False))

    async def text_of(self, tokens: Sequence[int]) -> str:
        """Like `decode_all`, beside the event loop where there are many."""
        if len(tokens) < LONG_TOKENS:
            return self.decode_all(tokens)
        # The batch leaves the interpreter to others.
        texts = await self._run(lambda: self._hub.decode_batch([list(tokens)], skip_special_tokens=False))
        return str(texts[0])

    def detokenizer(self) -> Detokenizer:
        """For one choice of an answer: it gives what `decode` gives of all its tokens."""
        return ByteDetokenizer(self._shown.__getitem__) if self._is_all_bytes else IncrementalDetokenizer(self.decode)

    def marking_detokenizer(self, marks: Mapping[int, str]) -> Detokenizer:
        """As `detokenizer`, but the tokens in `marks` become those characters."""
        return MarkingDetokenizer(self.detokenizer(), marks)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, which may be a part of a character."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._bytes_of(token)
        return known

    def _encode_long(self, text: str | LongText, add_special_tokens: bool, most_tokens: int, param: str) -> list[int]:
        if most_tokens and len(text) > LONG_CHARS * most_tokens:
            count = 0
            for part in slices(text, _COUNTED_CHARS):
                count += len(self._encode(part, False))
                if count > most_tokens + most_tokens // 8:  # where it is cut are a few tokens more than in the whole
                    raise ContextLengthError(
                        f"the prompt has more than {most_tokens} tokens",
                        why=f"this model's context is {most_tokens} tokens, prompt and answer together",
                        todo="shorten the prompt", param=param,
                    )  # fmt: skip
        ids = self._encode(text if isinstance(text, str) else text.whole(), add_special_tokens)
        if len(ids) > _MANY_TOKENS:
            return_free_memory()
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A lone surrogate has no UTF-8; clients send one as "\ud800" in JSON.
        try:
            # As `encode`, but it leaves the interpreter to others, and spares places in the text, a third of the time.
            ids: list[int] = self._hub.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:  # the latter is how the tokenizer reports it for any `str`
            why = "it has a lone surrogate"
            raise InvalidRequestError("the prompt is no valid Unicode text", why=why, param="prompt") from error
        return ids

    def _bytes_of(self, token: int) -> bytes:
        piece = self._hub.id_to_token(token)
        if piece is None:
            return b""
        if not self._is_all_bytes and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if self._is_byte_level and all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        return self.decode_all([token]).encode() or piece.encode()


class _ShownBytes(dict[int, bytes]):
    """Bytes of tokens as text shows them, looked up once each: none of `special` ones."""

    def __init__(self, tokenizer: Tokenizer, special: Collection[int]) -> None:
        super().__init__()
        self._tokenizer, self._special = tokenizer, special

    def __missing__(self, token: int) -> bytes:
        found = self[token] = b"" if token in self._special else self._tokenizer.token_bytes(token)
        return found


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, reversed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_level_alphabet()


def _read_tokenizer(path: Path) -> HubTokenizer:
    try:
        return HubTokenizer.from_str(path.read_text("utf-8"))
    except OSError as error:
        why = error.strerror or str(error)
        raise ModelError(f"cannot read {path}", why=why, todo="check the model folder") from error
    except Exception as error:  # the library raises plain Exception for a file it cannot parse
        raise ModelError(f"{path} is no tokenizer", why=str(error), todo="download the model again") from error


def _sizes(folder: Path) -> tuple[int, int]:
    """Sizes of the vocabulary and of the context, 0 for those that config.json lacks."""
    model = _read_json(folder / "config.json")
    model = {**model, **model.get("text_config", {})}
    return int(model.get("vocab_size") or 0), int(model.get("max_position_embeddings") or 0)


def _gguf_sizes(gguf: GgufModel) -> tuple[int, int]:
    """As `_sizes`, of a GGUF file."""
    embedding, architecture = "token_embd.weight", gguf.metadata.text("general.architecture")
    rows = gguf.tensor(embedding).shape[0] if embedding in gguf.file_of else 0
    return rows, gguf.metadata.whole(f"{architecture}.context_length", 0) or 0


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    source: Any = settings.get("chat_template") or ""
    if isinstance(source, list):  # several named templates
        return str({str(entry["name"]): entry["template"] for entry in source}.get("default", ""))
    return str(source)


def _read_template(path: Path) -> str:
    try:
        source = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        todo = "correct chat_template"
        raise ModelError(f"cannot read the chat template {path}", why=why, todo=todo) from error
    if not source.strip():
        raise ModelError(f"the chat template {path} is empty", todo="correct chat_template")
    return source


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    known = {**_read_json(folder / "special_tokens_map.json"), **settings}
    tokens: dict[str, Any] = {name: _content(known[name]) for name in _SPECIAL_TOKENS if known.get(name) is not None}
    if known.get("additional_special_tokens"):
        tokens["additional_special_tokens"] = [_content(token) for token in known["additional_special_tokens"]]
    return tokens


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # the latter: nested too deep
        raise ModelError(f"{path} is no JSON", why=str(error), todo="download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object", todo="download the model again")
    return value
