"""A conversation on a terminal: typed lines, commands among them, and the handling of Ctrl-C."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tandem.clusterctl.chat.client import Asker, ChatAnswer, Message, ReceivedCall
from tandem.clusterctl.chat.printer import say_answer, say_figures
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.output import check_file, note
from tandem.clusterctl.suggestions import did_you_mean
from tandem.core.errors import ConfigError, ContextLengthError, TandemError
from tandem.core.files import expand_user

PROMPT, MORE = "> ", ". "
HELP = """\
/system TEXT  use this system prompt from now on; without TEXT, none
/clear        clear the conversation, except for the system prompt
/save FILE    write the conversation to a new file, as JSON if its name ends in .json
/help         show this
/quit         leave, as Ctrl-D and Ctrl-C twice do
A line that ends with \\ goes on with the next one. What begins with // is sent with one slash.
Ctrl-C stops an answer; its text up to then is kept.
Where a tool is called, type its result."""


@dataclass(slots=True)
class Conversation:
    """A system prompt, "" = none, and questions with their answers, calls of tools and results between them."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def messages(self, *more: Message) -> list[Message]:
        """Return all messages, with new ones at the end."""
        before: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, *self.turns, *more]

    def save(self, path: Path) -> None:
        """Save to a new file: messages as JSON where its name ends in .json, else text. Raises ConfigError where a file
        exists already or cannot be created, and OSError."""
        check_file("FILE", path)
        said = self.messages()
        if path.suffix == ".json":
            text = json.dumps(said, indent=1, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"## {one['role']}\n\n{_text_of(one)}\n" for one in said)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{path} is there already", todo="Name a file that is not") from None


@dataclass(slots=True)
class Talk:
    """Questions and answers until the user leaves."""

    asker: Asker
    conversation: Conversation
    is_quiet: bool = False
    hides_thoughts: bool = False

    def run(self) -> Exit:
        """Run the conversation; OK, or INTERRUPTED where Ctrl-C ended it."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - `input` edits lines and remembers them from then on
        note(f"{self.asker.wish.model} at {self.asker.url}. /help shows the commands, Ctrl-D leaves.")
        was_interrupted = False
        while True:
            try:
                line = _read_lines()
            except EOFError:
                note("")
                return Exit.OK
            except KeyboardInterrupt:
                note("")
                if was_interrupted:
                    return Exit.INTERRUPTED
                was_interrupted = True
                note("Ctrl-C again, or Ctrl-D, leaves")
                continue
            was_interrupted = False
            if line.split() == ["/quit"]:
                return Exit.OK
            try:
                self._follow(line)
            except KeyboardInterrupt:
                note("")
            except TandemError as error:
                hint = " /clear begins anew." if isinstance(error, ContextLengthError) else ""
                note(f"{error.message}{hint}")
            except OSError as error:
                note(f"cannot use {error.filename or 'that'}: {error.strerror or error}.")

    def _follow(self, line: str) -> None:
        """Handle a command, or a question."""
        if not line.strip():
            return
        if not line.startswith("/") or line.startswith("//"):
            self._answer(line.removeprefix("/") if line.startswith("//") else line)
            return
        word, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system, "/clear": self._clear, "/save": self._save, "/help": lambda _: note(HELP),
        }  # fmt: skip
        if word not in commands:
            near = did_you_mean(word, [*commands, "/quit"])
            raise ConfigError(f"there is no command {word[:40]!r}", todo=near or "/help shows those there are")
        commands[word](rest.strip())

    def _answer(self, question: str) -> None:
        said: list[Message] = [{"role": "user", "content": question}]
        while True:
            answer = self._answer_to(said)
            if answer.finish_reason == "Ctrl-C":
                answer.calls.clear()  # they are not whole
                if not answer.text:
                    return
            said.append(answer.message())
            if not answer.calls:
                break
            said += [_result_of(call) for call in answer.calls.values()]
        self.conversation.turns += said  # at once: no server takes calls without results

    def _answer_to(self, said: list[Message]) -> ChatAnswer:
        answer = ChatAnswer()
        messages = self.conversation.messages(*said)
        try:
            say_answer(self.asker, answer, messages, hides_thoughts=self.hides_thoughts)
        except KeyboardInterrupt:
            answer.finish_reason = "Ctrl-C"
        if not self.is_quiet:
            say_figures(answer)
        return answer

    def _set_system(self, text: str) -> None:
        self.conversation.system = text
        note("the system prompt is set" if text else "there is no system prompt")

    def _clear(self, _: str) -> None:
        self.conversation.turns.clear()
        note("the conversation is cleared")

    def _save(self, file: str) -> None:
        if not file:
            raise ConfigError("/save requires a file", todo="Write /save FILE")
        path = expand_user(file)
        self.conversation.save(path)
        note(f"written: {path}")


def _result_of(call: ReceivedCall) -> Message:
    """Ask the user for the result of a call; KeyboardInterrupt for Ctrl-C and Ctrl-D, which drop the question."""
    try:
        result = _read_lines(f"result of {call.name}> ")
    except EOFError:
        raise KeyboardInterrupt from None
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def _text_of(message: Message) -> str:
    calls = [f"→ {one['function']['name']} {one['function']['arguments']}" for one in message.get("tool_calls", ())]
    return "\n".join([*([message["content"]] if message["content"] else []), *calls])


def _read_lines(prompt: str = PROMPT) -> str:
    """Read one input of the user, of one line or more; EOFError and KeyboardInterrupt for Ctrl-D and Ctrl-C."""
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(MORE))
    return "\n".join(lines)
