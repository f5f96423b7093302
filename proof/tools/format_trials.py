"""Trials of conversations: of a format as its models write it, and of a template."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report import ROOT
from proof.tools.conversations import Conversation, Kind, Turn, conversation
from proof.tools.round_trips import Answers, is_equal
from proof.tools.templates import LOSSY, Comparison, RefusedError, Written
from tandem.core.errors import ModelError
from tandem.core.output_format_names import ReasoningFormatName, ToolFormatName
from tandem.router.output_formats.registry import REASONING, TOOLS
from tests.unit.router.output_formats.answers import AT_THE_BEGINNING, written

FORMATS = [name.value for name in TOOLS]
KINDS = {"function_gemma": Kind(has_plain_keys=True, taken=("<escape>",))}
REASONING_OF = {"hermes": "think", "qwen3_coder": "think", "deepseek_v3": "think", "deepseek_v31": "think",
                "smollm2": "think", "mistral": "mistral", "harmony": "harmony"}  # fmt: skip
"""Of formats of models that reason."""
CUT_EVERYWHERE = 10
"""Answers of a template that are cut at every byte; those of a format all are."""


def conversations(form: str, seed: int, count: int) -> Iterator[tuple[int, Conversation]]:
    """The conversations of a format, by number."""
    for number in range(count):
        yield number, conversation(f"{seed} {form} {number}", KINDS.get(form, Kind()))


def of_format(name: str, seed: int, count: int) -> dict[str, Any]:
    """Outcome of answers as models of the format write them, tags as text and as tokens, cut everywhere in turns."""
    found: Counter[str] = Counter()
    reasoning = REASONING[ReasoningFormatName(REASONING_OF[name])] if name in REASONING_OF else None
    for number, one in conversations(name, seed, count):
        last = replace(
            one.last, content="" if name in AT_THE_BEGINNING else one.last.content,
            thoughts=one.last.thoughts if reasoning else "",
        )  # fmt: skip
        for has_tokens in (False, True):
            answers = Answers(TOOLS[ToolFormatName(name)], reasoning, one.schemas, has_tokens=has_tokens)
            is_cut = has_tokens is bool(number % 2)
            rng = random.Random(number)
            broken = _broken(answers, as_written(name, last), last, rng, found, is_cut_everywhere=is_cut)
            if broken:
                return {**found, "broken": f"conversation {number}: {broken}"}
        found["conversations"] += 1
    return dict(found)


def as_written(form: str, turn: Turn) -> str:
    """The answer as a model of this format writes it."""
    calls = written(form, turn.calls)
    if form == "harmony":
        thoughts = f"<|channel|>analysis<|message|>{turn.thoughts}<|end|><|start|>assistant" if turn.thoughts else ""
        content = f"<|channel|>commentary<|message|>{turn.content}<|end|><|start|>assistant" if turn.content else ""
        return thoughts + content + calls
    if form == "mistral":
        thoughts = f"[THINK]{turn.thoughts}[/THINK]" if turn.thoughts else ""
    else:
        thoughts = f"<think>\n{turn.thoughts}\n</think>\n\n" if turn.thoughts else ""
    return f"{thoughts}{turn.content}{calls}"


@functools.cache
def tokenizer_of_transformers() -> Any:
    """One that renders chat templates."""
    import transformers  # it takes seconds, and the other parts need none of it

    return transformers.AutoTokenizer.from_pretrained(str(ROOT / "models" / "tandem-tiny"))


def of_template(file: Path, seed: int, count: int) -> dict[str, Any]:
    """Outcome of conversations as a template writes them. Those that transformers refuses go without content beside
    thoughts, which is what some templates object to."""
    try:
        comparison = Comparison(file, tokenizer_of_transformers())
    except ModelError as error:
        return {"format": "none", "why": f"it does not compile: {error.why}"}
    form = comparison.formats.tools
    if form is None:
        return {"format": "none", "why": "it writes no calls in a format known here"}
    kind = KINDS.get(form.name, Kind())
    two = next(one for one in (conversation(f"two {n}", kind) for n in range(1000)) if len(one.last.calls) > 1)
    most = comparison.most_calls(two)
    found: Counter[str] = Counter()
    about = {"format": form.name, "lossy": LOSSY[file.stem]} if file.stem in LOSSY else {"format": form.name}
    for number, one in conversations(form.name, seed, count):
        given = one.cut(most)
        try:
            difference = comparison.difference(given)
        except RefusedError:
            given = given.with_less()
            try:
                difference = comparison.difference(given)
            except RefusedError as error:
                return {**about, "why": f"transformers cannot render it: {error}"}
        if difference:
            return {**about, **found, "broken": f"conversation {number}: {difference}"}
        found["rendered"] += 1
        answer = comparison.answer(given)
        broken = _broken_answer(comparison, given, answer, number, found)
        found["read"] += not broken
        if broken and file.stem not in LOSSY:
            return {**about, **found, "broken": f"conversation {number}: {broken}"}
    return {**about, **found, "messages": sorted(comparison.styles)}


def _broken_answer(
    comparison: Comparison, given: Conversation, answer: Written | None, number: int, found: Counter[str]
) -> str:
    if answer is None:
        return "the answer is not behind its prompt"
    form = comparison.formats.tools
    assert form is not None
    answers = Answers(
        form, comparison.formats.reasoning, given.schemas, has_tokens=bool(number % 2),
        begins_inside=answer.begins_inside,
    )  # fmt: skip
    return _broken(answers, answer.text, given.last, random.Random(number), found, is_partial=True,
                   is_cut_everywhere=number < CUT_EVERYWHERE)  # fmt: skip


def _broken(
    answers: Answers, text: str, turn: Turn, rng: random.Random, found: Counter[str], *, is_partial: bool = False,
    is_cut_everywhere: bool = True,
) -> str:  # fmt: skip
    """The first way in which the answer `text` does not come out as `turn`; "" = none. `is_partial`: content and
    thoughts may be missing, as templates leave them out, or thoughts be the content."""
    whole = answers.parts([answers.tokens(text)])
    if not is_equal(turn.calls, whole):
        return f"the calls of {text[:600]!r} are {whole.calls}"
    content, reasoning = whole.content.strip(), whole.reasoning
    allowed = ("", turn.content) if is_partial else (turn.content,)
    thought = (*allowed, "", turn.thoughts) if is_partial else (turn.thoughts,)
    if content not in allowed or reasoning not in thought:
        return f"of {text[:600]!r} the content is {content!r}, the reasoning {reasoning!r}"
    for pieces in answers.in_pieces(text, rng, is_cut_everywhere=is_cut_everywhere):
        found["pieces"] += 1
        if pieces != whole:
            return f"in pieces {text[:600]!r} is {pieces}, whole {whole}"
    found["with content"] += bool(content)
    found["with thoughts"] += bool(reasoning)
    return ""
