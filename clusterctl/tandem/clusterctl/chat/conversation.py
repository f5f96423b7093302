"""Messages of a conversation, in the form of an OpenAI endpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from tandem.clusterctl import out_files
from tandem.core.errors import ConfigError

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """A system prompt, "" = none, and pairs of a question and its answer."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def messages(self, question: str = "") -> list[Message]:
        """Return all messages, with a new question at the end."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        after = [{"role": "user", "content": question}] if question else []
        return [*before, *self.turns, *after]

    def add(self, question: str, answer: str) -> None:
        """Add a question and its answer."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def save(self, path: Path) -> None:
        """Save to a new file: messages as JSON where its name ends in .json, else text. Raises ConfigError where a file
        exists already or cannot be created, and OSError."""
        out_files.check("FILE", path)
        said = self.messages()
        if path.suffix == ".json":
            text = json.dumps(said, indent=1, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"## {one['role']}\n\n{one['content']}\n" for one in said)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{path} is there already", todo="Name a file that is not") from None
