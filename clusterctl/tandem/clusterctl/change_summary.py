"""Changes that a command makes outside the desired state: one line each, shown before consent and printed when done."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from tandem.clusterctl.output import Output, Record

if TYPE_CHECKING:
    from rich.console import Console

_SIGNS: Final = {"create": "+", "set": "~", "stop": "-", "revoke": "-", "release": "-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectKind:
    """One change; `subject` is its target: a worker, a key, a class."""

    deed: Literal["create", "set", "stop", "revoke", "release"]
    subject: str
    detail: str = ""

    @property
    def line(self) -> str:
        """Return the change as text."""
        return f"{_SIGNS[self.deed]} {self.subject}: {self.deed}" + (f" ({self.detail})" if self.detail else "")


def lines_of(deeds: Sequence[EffectKind]) -> list[str]:
    """Return the changes, one a line."""
    return [deed.line for deed in deeds]


def show_done(deeds: Sequence[EffectKind], output: Output, text: str) -> None:
    """Show the changes made; `text` describes them. No deeds: nothing had to change."""
    _show(deeds, output, [text], is_dry_run=False)


def show_would(deeds: Sequence[EffectKind], output: Output, nothing: str = "nothing to change") -> None:
    """Show the changes that would be made; `nothing` is the text if there are none."""
    lines = [*lines_of(deeds), "nothing was changed (--dry-run)"] if deeds else [nothing]
    _show(deeds, output, lines, is_dry_run=True)


def _show(deeds: Sequence[EffectKind], output: Output, lines: Sequence[str], *, is_dry_run: bool) -> None:
    def view(found: Record, console: Console) -> None:
        from tandem.clusterctl.rich_output import say

        for line in lines:
            say(console, line)

    rows = [dataclasses.asdict(deed) for deed in deeds]
    output.show("Effect", {"is_dry_run": is_dry_run, "is_changed": bool(rows), "changes": rows}, view)
