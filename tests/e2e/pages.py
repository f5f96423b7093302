"""Commands of pages, as people would copy them."""

import re
import shlex
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs" / "operate"


def commands(page: str, heading: str = "") -> list[str]:
    """Commands in blocks of bash of a page of docs/operate, or of one part of it."""
    text = (PAGES / f"{page}.md").read_text()
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    joined = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip()]


def lines(page: str) -> list[list[str]]:
    """The same in words."""
    return [shlex.split(line, comments=True) for line in commands(page)]
