"""Names of workers, models, events and answers are shown by the page in a real Chromium as text, inside its frame."""

from collections.abc import Iterator

import pytest

from tests.integration.router.staged_page import sections, staged
from tools.browser import Browser, browsing, missing

MARKUP = "\"'><img src=x onerror=harm()><script>harm()</script><svg onload=harm()></style></title>&lt;b&gt;${harm()}"
LONG = "-" + "wide" * 40
SHOWN = ("#cluster-name", "#topology", "#workers", "#links tbody", "#plan", "#requests", "#blocks", "#events",
         "#trouble", "#model", "#scale-model")  # fmt: skip
STRANGE = "document.querySelectorAll('img, iframe, object, embed, script:not([src=\"main.js\"]), [onload], [onerror]')"
WIDE = """[...document.querySelectorAll('body *')].filter((e) => e.offsetParent && !e.closest('.skip, thead, h1')
  && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"there is no {missing()} here; .ci/run installs it")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


def test_markup_in_names_and_answers_is_text(chromium: Browser) -> None:
    with staged(sections(MARKUP), MARKUP) as url:
        chromium.visit(url, "any key")
        chromium.wait("document.querySelectorAll('#workers tbody tr').length === 10", what="workers are shown")
        chromium.type("#prompt", f"{MARKUP}\n")
        chromium.wait("document.querySelector('#talk .answer .request')", what="the chat was answered")
        chromium.click("#workers tbody tr:nth-child(1) button:nth-child(1)")
        chromium.wait("!document.querySelector('#confirm').hidden", what="a change is proposed")
        for selector in (*SHOWN, "#talk .question", "#talk .answer p", "#talk .request ol", "#change-list li"):
            words = chromium.look("document.querySelector(arguments[0]).textContent", selector)
            assert MARKUP in words, selector
        assert chromium.look(f"[...{STRANGE}].map((e) => e.outerHTML)") == []
        assert chromium.errors() == [], "the policy was never needed"
        chromium.driver.get("about:blank")


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_long_names_stay_on_the_screen(chromium: Browser, width: int) -> None:
    chromium.set_size(width, 900)
    with staged(sections(LONG), LONG) as url:
        chromium.visit(url, "any key")
        chromium.wait("document.querySelectorAll('#workers tbody tr').length === 10", what="workers are shown")
        chromium.click("#links summary")
        chromium.click("#requests summary")
        assert chromium.look("document.scrollingElement.scrollWidth") <= width
        assert width > 360 or chromium.look(WIDE) == []
        assert chromium.errors() == []
        chromium.driver.get("about:blank")


def test_figures_are_written_for_people(chromium: Browser) -> None:
    with staged(sections(""), "") as url:
        chromium.visit(url, "any key")
        chromium.wait("document.querySelectorAll('.figure strong').length === 6", what="figures are shown")
        figures = chromium.look("[...document.querySelectorAll('.figure strong')].map((e) => e.textContent)")
        assert figures == ["226 ms", "17 ms", "5.64/s", "5.10/s", "1016/s", "4514/s"], "never 1.02e+3"
        assert chromium.look("document.querySelector('.between h3').textContent") == "1 link, 3.20 GB/s"
        chromium.driver.get("about:blank")
