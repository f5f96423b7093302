"""docs/operate/logs.md: its two lines are one record, as the formats have it."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.clusterctl.inspect.log_files import records

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operate" / "logs.md").read_text()


def test_both_lines_say_the_same(tmp_path: Path) -> None:
    for language in ("text", "json"):
        [line] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        (tmp_path / "router-0.log").write_text(line)
        (found,) = records(tmp_path, ["router-0"])
        assert (found.time, found.level) == ("2026-11-23T13:04:16.211Z", "WARNING"), language
        assert found.text.split() == [
            "attempt", "failed", "request=cmpl-0123abcd", "trace=0af7651916cd43dd8448eb211c80319c", "attempt=1",
            "cause=lost",
        ]  # fmt: skip
