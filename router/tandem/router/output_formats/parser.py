"""Takes answers apart as they grow: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.router.output_formats.custom_tools import InputUnwrapper
from tandem.router.output_formats.events import Event
from tandem.router.output_formats.families.harmony import HARMONY, read_messages
from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import FIRST_MARK, Reader, Step
from tandem.router.output_formats.reasoning import HARMONY_CHANNELS, ReasoningFormat
from tandem.router.output_formats.tool_format import Schemas, ToolFormat, call_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSpec:
    """The formats of an answer. `tags` are the tags that are tokens, by id; `begins_inside`: the prompt ends with the
    beginning of reasoning; `is_parallel`: more than one call counts; `customs`: names of custom tools."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    tags: Mapping[int, str] = field(default_factory=dict)
    begins_inside: bool = False
    is_parallel: bool = True
    customs: frozenset[str] = frozenset()

    @property
    def marks(self) -> dict[int, str]:
        """The characters that stand for tokens that are tags, by id."""
        return {token: chr(FIRST_MARK + place) for place, token in enumerate(self.tags)}


class OutputParser:
    """The parser of one choice. Text is cut anywhere; tokens that are tags come as their marks."""

    def __init__(self, spec: ParserSpec) -> None:
        self._spec = spec
        marks = spec.marks
        self._reader = Reader({spec.tags[token]: mark for token, mark in marks.items()})
        texts = {ord(mark): spec.tags[token] for token, mark in marks.items()}
        new_id = spec.tools.new_id if spec.tools else call_id
        self._output = PartCollector(self._reader, texts, new_id, is_parallel=spec.is_parallel)
        self._unwrapper = InputUnwrapper(spec.customs) if spec.customs else None
        self.failures = 0
        """Texts that began as calls and were none."""
        self._steps = self._run()
        next(self._steps, None)

    @property
    def is_reasoning(self) -> bool:
        """True if the next text belongs to reasoning."""
        return self._output.is_reasoning

    def add(self, text: str) -> list[Event]:
        """Parts of the answer that are certain with `text`."""
        self._reader.feed(text)
        next(self._steps, None)
        return self._events()

    def finish(self) -> list[Event]:
        """The rest: no more text comes."""
        self._reader.is_over = True
        next(self._steps, None)
        self._output.finish()
        return self._events()

    def _events(self) -> list[Event]:
        events = self._output.events()
        return events if self._unwrapper is None else list(self._unwrapper.unwrapped(events))

    def _run(self) -> Step[None]:
        spec, reader, output = self._spec, self._reader, self._output
        if spec.reasoning is HARMONY_CHANNELS or spec.tools is HARMONY:
            yield from read_messages(reader, output, spec.schemas if spec.tools else None)
            return
        if spec.reasoning is not None:
            yield from self._reason(spec.reasoning)
        triggers: tuple[str, ...] = ()
        if spec.tools is not None:
            triggers = spec.tools.triggers
            if spec.tools.openings and (yield from reader.begins(*spec.tools.openings)):
                yield from self._call(spec.tools)
        while (yield from reader.until(triggers, output.content)):
            if spec.tools is not None:
                yield from self._call(spec.tools)

    def _reason(self, form: ReasoningFormat) -> Step[None]:
        """Read reasoning at the beginning; a call ends it, too."""
        reader, output = self._reader, self._output
        if not self._spec.begins_inside and not (yield from reader.skip(form.begin)):
            return
        output.begin_reasoning()
        if self._spec.begins_inside:  # some models repeat it
            yield from reader.skip(form.begin)
        triggers = self._spec.tools.triggers if self._spec.tools else ()
        if (yield from reader.until((form.end, *triggers), output.reasoning)):
            output.end_reasoning()
            yield from reader.skip(form.end)

    def _call(self, form: ToolFormat) -> Step[None]:
        self._reader.kept, self._reader.is_keeping = "", True
        is_call = yield from form.read(self._reader, self._output, self._spec.schemas)
        self._reader.is_keeping = False
        if not is_call:
            self.failures += not self._reader.is_over
            self._output.content(self._reader.kept)
