"""Reading of the pages of docs/operate."""


def table(text: str, heading: str) -> list[list[str]]:
    """Rows of the first table under that heading, without its head."""
    lines = text.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
