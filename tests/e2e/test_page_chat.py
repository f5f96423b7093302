"""The chat of the operators' page in a real browser: schemas, calls and thoughts of a model that has them."""

import json
from collections.abc import Iterator

import pytest

from tests.thinking_model import thinking_model
from tools.browser import Browser, browsing, missing
from tools.running_cluster import running

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"there is no {missing()} here; .ci/run installs it")
ANSWER = "document.querySelector('#talk .answer')"
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": {"enum": [{"colour": "red"}]}}}]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    model = thinking_model(tmp_path_factory.mktemp("model"))
    config = f'[model]\npath = "{model}"\nserved_names = ["thinking"]\n'
    with running("--mixed", "1", config=config) as cluster, browsing() as browser:
        browser.set_size(1280, 1000)
        browser.enter(cluster)
        browser.wait("document.querySelector('#model').options.length === 1", what="the model is offered")
        browser.run("document.querySelectorAll('#chat details').forEach((one) => { one.open = true; })")
        yield browser
        assert browser.errors() == []


def fill(page: Browser, **fields: str) -> None:
    for name, value in fields.items():
        page.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)


def ask(page: Browser) -> None:
    page.click("#anew")
    page.type("#prompt", "Which colour?\n")
    page.wait("document.querySelector('#send').disabled === false && document.querySelector('#talk .answer')")


def test_thoughts_are_folded_and_an_answer_follows_its_schema(page: Browser) -> None:
    fill(page, schema='{"enum": ["red", "green"]}', tools="", budget="12")
    ask(page)
    page.wait(f"{ANSWER}.querySelector('.request')", what="the answer is complete")
    assert page.look(f"JSON.parse({ANSWER}.querySelector(':scope > p').textContent)") in ("red", "green")
    assert page.look(f"[...{ANSWER}.children].map((one) => one.className)")[:2] == ["thought", ""]
    assert page.look(f"[{ANSWER}.querySelector('.thought').open, {ANSWER}.querySelector('.thought p').innerText]") == [
        False, "",
    ]  # fmt: skip
    page.click("#talk .thought summary")
    assert page.look(f"{ANSWER}.querySelector('.thought p').innerText.length") > 10


def test_calls_are_folded(page: Browser) -> None:
    fill(page, schema="", tools=json.dumps(TOOLS), budget="12")
    page.click("#must-call")
    ask(page)
    page.click("#must-call")
    page.wait(f"{ANSWER}.querySelector('.request')", what="the answer is complete")
    assert page.look(f"{ANSWER}.querySelector('.call summary').innerText") == "Calls paint"
    assert json.loads(page.look(f"{ANSWER}.querySelector('.call p').textContent")) == {"colour": "red"}
    assert page.look(f"{ANSWER}.querySelector('.call').open") is False


def test_what_is_no_json_is_named_and_not_sent(page: Browser) -> None:
    fill(page, schema='{"enum": [', tools="", budget="")
    ask(page)
    assert "The schema is not JSON" in page.look(f"{ANSWER}.querySelector('.error').textContent")
    assert page.look(f"{ANSWER}.querySelector('.request')") is None
