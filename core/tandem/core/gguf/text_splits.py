"""Pre-tokenizers of byte-level vocabularies, by the name that a GGUF file gives: `tokenizer.ggml.pre`. In the form of a
tokenizer.json.

The expressions are those of the models' own tokenizer.json, where llama.cpp has others that mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_REST}"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = rf"{_CASED % (_ENDINGS, _ENDINGS)}|\p{{N}}{{1,3}}|{_CASED_REST}"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """`patterns` are applied one to the pieces of the other; without any, text is cut as GPT-2 does.

    has_lone_digits   every digit is a piece, before that
    takes_whole       a piece that is a token is that token, whatever the merges
    adds_bos          unless the file states otherwise
    is_composed       characters are composed first (NFC)
    """

    patterns: tuple[str, ...] = ()
    has_lone_digits: bool = False
    takes_whole: bool = False
    adds_bos: bool = False
    is_composed: bool = False

    def pre_tokenizer(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = []
        if self.has_lone_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        steps += [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        steps.append({
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not self.patterns,
        })  # fmt: skip
        return {"type": "Sequence", "pretokenizers": steps}

    def normalizer(self) -> dict[str, Any] | None:
        return {"type": "NFC"} if self.is_composed else None


def _each(names: str, splitting: Splitting) -> dict[str, Splitting]:
    return dict.fromkeys(names.split(), splitting)


SPLITTINGS: dict[str, Splitting] = {
    **_each("gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum", Splitting()),
    **_each("smollm starcoder refact command-r codeshell exaone minerva-7b", Splitting(has_lone_digits=True)),
    **_each(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        Splitting(patterns=(_LLAMA3,), takes_whole=True, adds_bos=True),
    ),
    **_each("dbrx smaug-bpe glm4 chatglm-bpe", Splitting(patterns=(_LLAMA3,))),
    **_each("qwen2", Splitting(patterns=(_QWEN2,), is_composed=True)),
    **_each("deepseek-r1-qwen kormo megrez stablelm2 hunyuan grok-2", Splitting(patterns=(_QWEN2,))),
    **_each("tekken", Splitting(patterns=(_TEKKEN,), takes_whole=True, adds_bos=True)),
    **_each("gpt-4o llama4 kanana2 minimax-m2", Splitting(patterns=(_GPT4O,))),
    **_each("deepseek-v3 hunyuan-dense", Splitting(patterns=_DEEPSEEK3)),
    **_each("deepseek-coder", Splitting(patterns=_DEEPSEEK_CODER)),
}
