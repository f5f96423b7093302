"""Hostile regular expressions: nested and giant repetitions, unicode classes, wide alternatives, deep groups."""

from __future__ import annotations

from random import Random

CLASSES = (r"\w", r"\W", r"\d", r"\s", r"\S", r"\p{L}", r"\p{Greek}", r"\P{Lu}", ".", "[^a]", "[a-z]", "[^\\x00-\\x7F]",
           "[\\u4e00-\\u9fff]", r"\p{Script=Han}", "(?i:k)", "[\\w--\\d]", "(?s:.)")  # fmt: skip
COUNTS = (0, 1, 2, 3, 7, 10, 50, 100, 255, 1000, 10_000, 65_535, 100_000, 10**9)


def regex(random: Random) -> str:
    """One of any of the kinds."""
    return random.choice((nested, giant, alternatives, soup, searched, stepped, broken, simple, simple))(random)


def simple(random: Random) -> str:
    """One as people write it."""
    return random.choice(
        ("^[a-z]+$", r"^\d{3}-\d{4}$", "a", "^x-", r"^[A-Z]\w*$", r"^(foo|bar)\d?$", "^.{1,20}$", ".*")
    )


def _count(random: Random) -> str:
    low = random.choice(COUNTS)
    return random.choice((f"{{{low}}}", f"{{{low},}}", f"{{0,{low}}}", f"{{{low},{low + random.choice(COUNTS)}}}"))


def nested(random: Random) -> str:
    """Repetitions of repetitions."""
    made = random.choice(CLASSES)
    for _ in range(random.randint(2, 8)):
        made = f"({made}{random.choice(('+', '*', '?', '{2}', '{0,9}', '{10}', '{1,50}', _count(random)))}"
        made += f"{random.choice(('', 'a', '|b', '|', '.'))})"
    return random.choice((made + "+", f"^{made}*$", made + "b"))


def giant(random: Random) -> str:
    """A repetition with a giant count."""
    made = "".join(f"{random.choice(CLASSES)}{_count(random)}" for _ in range(random.randint(1, 6)))
    return random.choice((made, f"^{made}$", f"({made}){_count(random)}"))


def alternatives(random: Random) -> str:
    """Many words, or many repetitions beside each other."""
    count = int(2000 ** random.random())
    kind = random.randrange(3)
    if kind == 0:
        return "|".join(f"w{random.randrange(10**6)}" for _ in range(count))
    if kind == 1:
        return "|".join(f".*{n}.*" for n in range(min(count, 60)))
    return "(" + "|".join(f"(a{{{n}}})*" for n in range(1, min(count, 100))) + ")*"


def soup(random: Random) -> str:
    """Atoms and operators in no order."""
    atoms = (*CLASSES, "a", "(", ")", "|", "*", "+", "?", "{3}", "^", "$", "[", "]", "\\b", "\\", "(?:", "é", "{,5}")
    return "".join(random.choice(atoms) for _ in range(random.randint(1, 60)))


def searched(random: Random) -> str:
    """Something at a distance behind something: as many states as two to the power of the distance."""
    distance = random.choice((5, 10, 15, 20, 30, 100, 1000))
    made = f".*{random.choice(('a', '[ab]', 'x'))}.{{{distance}}}{random.choice(('', 'b', 'c.*', '[a-z]'))}"
    return random.choice((made, f"^({made})$", f"({made}|{made}b)+"))


def stepped(random: Random) -> str:
    """Lengths that are multiples of different numbers: states multiply."""
    numbers = random.sample((2, 3, 5, 7, 11, 13, 17, 19, 23), random.randint(2, 7))
    return "|".join(f"({random.choice(('a', '.', '[ab]'))}{{{n}}})*" for n in numbers)


def broken(random: Random) -> str:
    """One that does not parse, or with what cannot be supported."""
    return random.choice(("(", "[", "a{2,1}", "(?=a)b", "(?<!a)b", r"(a)\1", "*", "(?P<a", "\\", "[z-a]", r"\p{Moon}",
                          "(" * random.randint(1, 400) + "a" + ")" * 400, "a" * random.randint(1, 20_000),
                          "(?:" * 200 + ")" * 200, "x**+", "(?>a)", r"\u{110000}", "a{99999999999}"))  # fmt: skip
