"""The operators' page in a real browser, on a simulated cluster of two prefill and three decode workers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_fixture import cluster_fixture
from tests.integration.worker.pair import MODEL
from tools.browser import Browser, browsing, missing
from tools.running_cluster import Cluster, kill
from tools.waiting import wait_for

CONFIG = """
[worker]
engine = "sim"
[worker.sim]
prefill_tokens_per_s = 2000.0
decode_step_s = 0.02
[slo.chat]
ttft_s = 2.0
itl_s = 0.1
[admission]
default_slo = "chat"
[planner]
mode = "advise"
"""
NAMES = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
ROWS = "[...document.querySelectorAll('#workers tbody tr')]"
STATES = f"{ROWS}.map((row) => [row.dataset.key, row.cells[1].textContent, row.dataset.level, row.cells[2].innerText])"
RED_WITHIN_S = 3.0

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"there is no {missing()} here; .ci/run installs it")


cluster = cluster_fixture(
    "--prefill", "2", "--decode", "3", "--disaggregation", "always", "--model", str(MODEL), config=CONFIG
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(chromium: Browser, cluster: Cluster) -> Iterator[Browser]:
    """The page with the admin key given, all workers ready; nothing may have been complained of at the end."""
    chromium.driver.get("about:blank")
    chromium.set_size(1280, 900)
    chromium.set_dark(False)
    chromium.errors()
    chromium.enter(cluster)
    chromium.wait(f"{STATES}.filter((row) => row[2] === 'ok').length === 5", what="five workers are shown as ready")
    yield chromium
    errors = chromium.errors()
    chromium.run("sessionStorage.clear()")
    assert errors == []


def test_it_shows_the_cluster_as_it_is(page: Browser, cluster: Cluster) -> None:
    shown = page.look(STATES)
    assert [row[0] for row in shown] == NAMES
    assert [row[1] for row in shown] == ["prefill"] * 2 + ["decode"] * 3
    assert all("ready" in row[3] for row in shown), "in words, not in colour alone"
    titles = page.look(
        "[...document.querySelectorAll('#topology .column h3')].filter((e) => e.offsetParent).map((e) => e.innerText)"
    )
    assert titles == ["Front door", "Prefill (2)", "Decode (3)"]
    assert page.look("document.querySelector('#health').innerText").split() == ["●", "ok"]
    assert "live" in page.look("document.querySelector('#connection').innerText")
    for number in range(4):
        body = {"model": "tandem-tiny", "prompt": [600 + number] * 200, "max_tokens": 20, "ignore_eos": True}
        assert cluster.post("/v1/completions", body)[0] == 200
    page.wait("document.querySelectorAll('#requests > .request').length >= 4", what="requests are shown")
    phases = "[...document.querySelector('#requests .bar').children].map((piece) => piece.dataset.phase)"
    page.wait(f"['prefill', 'transfer', 'decode'].every((one) => {phases}.includes(one))", what="its phases are drawn")
    page.wait("document.querySelectorAll('.between path').length > 0", what="a link in use is drawn")
    page.wait("/^\\d+ links?, .*B.s/.test(document.querySelector('.between h3').textContent)", what="with its speed")
    page.wait("document.querySelector('#links td:nth-child(4)')?.textContent.endsWith('B/s')", what="each is listed")
    page.wait(
        "document.querySelectorAll('.figure')[0].querySelector('strong').textContent !== '–'", what="TTFT is known"
    )
    page.wait(
        "document.querySelectorAll('.figure')[2].querySelector('strong').textContent.endsWith('/s')", what="goodput"
    )
    assert page.look("document.querySelector('.figure path').getAttribute('d').length") > 0
    page.wait("document.querySelectorAll('#events li').length > 5", what="events are listed")
    page.wait("document.querySelector('#plan').textContent.includes('planner')", what="the planner is heard")
    assert page.look("document.querySelectorAll('#blocks li').length") == 5


def test_the_key_is_in_no_address(page: Browser, cluster: Cluster) -> None:
    key = Path(cluster.context["admin_key_file"]).read_text().strip()
    seen = page.look("[location.href, document.cookie, ...performance.getEntries().map((entry) => entry.name)]")
    assert any(name.endswith("/ui/main.js") for name in seen)
    assert not [name for name in seen if key in name]
    page.click("#leave")
    assert page.look("[sessionStorage.length, document.querySelector('#page').hidden]") == [0, True]


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_on_a_narrow_screen(page: Browser, is_dark: bool) -> None:
    page.set_dark(is_dark)
    for width in (360, 1280):
        page.set_size(width, 800)
        page.wait("innerWidth === arguments[0]", width)
        wide = "[...document.querySelectorAll('body *')].filter((e) => e.offsetParent && !e.closest('.skip, thead') "
        wide += "&& e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"
        assert page.look("document.scrollingElement.scrollWidth") <= width
        assert width == 1280 or page.look(wide) == []
        assert page.look(CONTRAST) == [], "words stand out from what is behind them"


CONTRAST = """(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$|transparent/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const low = [];
  for (const e of document.querySelectorAll("#page *, header *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.offsetParent || e.disabled) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
    if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) low.push(e.outerHTML.slice(0, 80));
  }
  return low;
})()"""


def test_a_killed_worker_turns_red_and_comes_back(page: Browser, cluster: Cluster) -> None:
    """The machine may be busy elsewhere when one is killed, and not each time."""
    took_s: list[float] = []

    def is_soon() -> bool:
        took_s.append(_red_after(page, cluster))
        return took_s[-1] < RED_WITHIN_S

    try:
        wait_for(is_soon)
    except AssertionError as error:
        raise AssertionError(f"{error}: red after {took_s} s") from None


def _red_after(page: Browser, cluster: Cluster) -> float:
    """Seconds from a kill until the page shows it; until it is back."""
    page.run(
        "window.redMs = 0; const line = document.querySelector('#workers [data-key=decode-1]');"
        "new MutationObserver(() => { if (line.dataset.level === 'bad' && !window.redMs) {"
        " window.redMs = Date.now(); window.redWords = line.cells[2].innerText; } })"
        ".observe(line, {attributes: true, subtree: true});"
    )
    killed_s = time.time()
    kill(cluster.pids()["decode-1"][0])
    red_s = page.wait("window.redMs", what="decode-1 is shown in red") / 1000
    assert page.look("window.redWords").split()[1] in ("unreachable", "gone", "missing")
    page.wait(f"{STATES}.filter((row) => row[2] === 'ok').length === 5", what="it is back")
    return float(red_s - killed_s)


def test_a_chat_streams_and_its_waterfall_follows(page: Browser) -> None:
    page.run(
        "window.lengths = new Set(); new MutationObserver(() => window.lengths.add("
        "document.querySelector('#talk .answer p')?.textContent.length))"
        ".observe(document.querySelector('#talk'), {childList: true, subtree: true, characterData: true});"
    )
    assert page.look("document.querySelector('#prompt').value") == "What is the capital of France?"
    page.type("#prompt", "Say something long\n")
    page.wait(
        "document.querySelector('#talk .answer .request .bar')?.children.length > 2", what="the waterfall is drawn"
    )
    assert page.look("window.lengths.size") > 5, "it came bit by bit"
    phases = page.look("[...document.querySelectorAll('#talk .answer li')].map((line) => line.dataset.phase)")
    assert phases[-3:] == ["prefill", "transfer", "decode"]
    assert page.look("document.querySelector('#talk .answer p').textContent.length") > 20
    page.click("#anew")
    assert page.look("document.querySelector('#talk').children.length") == 0


def test_a_flip_shows_what_it_does_asks_and_is_done(page: Browser, cluster: Cluster) -> None:
    before = desired(cluster)
    page.click("#workers [data-key=decode-2] button:nth-child(2)")
    page.wait("document.querySelector('#change').open && !document.querySelector('#confirm').hidden", what="it asks")
    words = page.look("document.querySelector('#change').innerText")
    assert "Flip decode-2 to prefill" in words
    assert "2P:3D becomes 3P:2D" in words
    assert page.look("[...document.querySelectorAll('#change-list li')].map((e) => e.firstChild.textContent)") == [
        "decode-2"
    ]
    page.click("#cancel")
    assert desired(cluster) == before, "to look is to change nothing"
    page.click("#workers [data-key=decode-2] button:nth-child(2)")
    page.wait("document.activeElement.id === 'confirm'", what="it asks again")
    page.driver.switch_to.active_element.send_keys("\n")  # the keyboard alone is enough
    page.wait("!document.querySelector('#change').open", what="it is written")
    page.wait(
        f"{STATES}.some((row) => row[0] === 'decode-2' && row[1] === 'prefill' && row[2] === 'ok')", what="flipped"
    )
    roles = {row["worker"]: row.get("role") for row in cluster.status()["workers"]}
    assert sorted(roles.values()) == ["decode"] * 2 + ["prefill"] * 3
    assert roles["decode-2"] == "prefill"
    page.wait("document.querySelector('#topology').innerText.includes('Prefill (3)')")
    page.wait("document.querySelector('#scale-fields [data-role=decode]')?.value === '2'")
    page.type("#scale-fields [data-role=prefill]", "2")
    page.type("#scale-fields [data-role=decode]", "3")
    page.click("#scale-form button")
    page.wait("!document.querySelector('#confirm').hidden", what="the scale is proposed")
    page.click("#confirm")
    wait_for(
        lambda: sorted(row.get("role", "") for row in cluster.status()["workers"]) == ["decode"] * 3 + ["prefill"] * 2
    )


def test_nobody_looks_or_changes_without_the_key(chromium: Browser, cluster: Cluster) -> None:
    before = desired(cluster)
    chromium.driver.get("about:blank")
    chromium.enter(cluster, key="not the key of anybody")
    chromium.wait("document.querySelector('#login-error').textContent.includes('missing or wrong')")
    assert chromium.look("document.querySelector('#page').hidden")
    assert "prefill-0" not in chromium.driver.page_source
    script = """
        const done = arguments[arguments.length - 1];
        const body = JSON.stringify({wish: {verb: "flip", worker: "decode-2", role: "prefill"}});
        const ask = (path, headers) =>
          fetch(`../admin/v1/${path}`, {method: "POST", body, headers, credentials: "include"});
        Promise.all([ask("desired/propose", {}), ask("desired", {}), ask("desired", {authorization: "Bearer no"}),
          ask("chat", {}), ask("down", {})])
          .then((answers) => done(answers.map((answer) => answer.status)), (error) => done(String(error)));
    """
    assert chromium.driver.execute_async_script(script) == [401] * 5
    assert desired(cluster) == before
    assert cluster.process.poll() is None


def desired(cluster: Cluster) -> Any:
    return cluster.admin("/admin/v1/desired")["desired"]
