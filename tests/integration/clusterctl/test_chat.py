"""`clusterctl chat` against real routers, and against an endpoint that is none of ours: answers, figures, errors."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.clusterctl.chat.client import ChatAnswer
from tandem.clusterctl.chat.printer import line_of
from tandem.clusterctl.exit_codes import Exit
from tandem.core.config import Anonymous
from tests.integration.clusterctl.chat_endpoint import Endpoint, Run, chat_runner, serving
from tests.integration.clusterctl.terminal import CTRL_C, CTRL_D, Terminal
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness, builder
from tests.integration.router.scripted_worker import Script
from tests.unit.clusterctl.document_check import checked
from tools.waiting import wait_for

GREEDY = ("--temperature", "0", "--max-tokens", "8")
UP, BACKSPACE = "\x1b[A", "\x7f"
PROMPT = "\n> "


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    with builder(tmp_path_factory.mktemp("router")) as make:
        yield make


@pytest.fixture(scope="module")
def house(build: Build) -> RouterHarness:
    made = build()
    made.wait_ready()
    return made


def says(*texts: str, **more: Any) -> list[bytes]:
    """Events with these texts, and their end."""
    deltas = [{"content": text} for text in texts]
    events = [{"id": "x-1", "model": "m", "choices": [{"index": 0, "delta": delta, **more}]} for delta in deltas]
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode() for event in events]
    return [*lines, b"data: [DONE]\r\n\r\n"]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving(says("Hel", "lo", finish_reason="stop")) as found:
        yield found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return chat_runner(capsys, monkeypatch)


def direct(house: RouterHarness, *messages: tuple[str, str]) -> str:
    """Return the API's answer to the same messages."""
    body = {"model": "tiny", "messages": [{"role": role, "content": text} for role, text in messages]}
    answer = httpx.post(f"{house.url}/v1/chat/completions", json=body | {"temperature": 0, "max_tokens": 8}, timeout=60)
    return str(answer.json()["choices"][0]["message"]["content"])


# ---- one answer ----------------------------------------------------------------------------------------------------


def test_an_answer_and_the_line_under_it(run: Run, house: RouterHarness) -> None:
    code, out, error = run("Hi", "--url", house.url, *GREEDY)
    assert (code, out) == (0, direct(house, ("user", "Hi")).removesuffix("\n") + "\n")
    (line,) = error.splitlines()
    for part in ("TTFT ", " tokens/s", "prefill-0 → decode-0", "hand-off ", " in, 8 out, 0 cached", "ended by length"):
        assert part in line, line
    assert run("Hi", "--url", house.url, *GREEDY, "-q") == (0, out, "")


def test_one_worker_that_does_it_all_hands_nothing_over(run: Run, build: Build) -> None:
    alone = build(prefill=0, decode=0, mixed=1)
    alone.wait_ready()
    line = run("Hi", "--url", alone.url, *GREEDY)[2]
    assert " · on mixed-0 · " in line
    assert "hand-off" not in line


def test_a_question_on_the_standard_input(run: Run, house: RouterHarness) -> None:
    where = ("--url", house.url, "--system", "Be brief.", "-q", *GREEDY)
    want = direct(house, ("system", "Be brief."), ("user", "Hi\nthere"))
    for more in ((), ("-",)):
        assert run(*more, *where, typed=b"Hi\nthere\n")[:2] == (0, want.removesuffix("\n") + "\n")


def test_an_answer_as_a_document(run: Run, house: RouterHarness) -> None:
    code, out, error = run("Hi", "--url", house.url, *GREEDY, "--seed", "7", "-o", "json")
    found = checked(out, "Chat")
    assert (code, error) == (0, "")
    assert (found["text"], found["finish_reason"]) == (direct(house, ("user", "Hi")), "length")
    assert (found["url"], found["model"], found["reasoning"]) == (house.url, "tandem-tiny", "")
    assert found["usage"]["completion_tokens"] == 8
    assert 0 < found["timings"]["ttft_s"] <= found["timings"]["total_s"]
    assert found["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
    assert found["handoff"]["overhead_s"] >= 0
    assert found["id"].startswith("chatcmpl-")
    sent = house.workers["prefill-0"].submitted[-2].sampling
    assert (sent.temperature, sent.max_tokens, sent.seed) == (0, 8, 7)


def test_how_quick_an_answer_was() -> None:
    """Tokens that waited here to be read are as quick as they were made."""
    seen = ChatAnswer(usage={"prompt_tokens": 4, "completion_tokens": 9}, sent_s=1.0, first_s=1.5, last_s=2.5)
    assert seen.record()["timings"] == {"ttft_s": 0.5, "total_s": 1.5, "tokens_per_s": 8.0}
    told = replace(seen, timing={"first_token_s": 0.1, "done_s": 2.1, "prefill": None, "decode": "d"})
    assert told.record()["timings"]["tokens_per_s"] == 4.0
    assert told.record()["workers"] == {"prefill": "d", "decode": "d"}
    assert line_of(replace(told, usage=None).record()) == "TTFT 500.0 ms · on d"


def test_an_endpoint_of_another_kind(run: Run, endpoint: Endpoint) -> None:
    """U+2028 and U+0085 end no line of server-sent events. Of its figures only the reported ones are known."""
    endpoint.pieces = says("a\u2028b", "\u0085\x1b[31m")
    code, out, error = run("Hi", "--url", endpoint.url, "--model", "m")
    assert (code, out) == (0, "a\u2028b\u0085\x1b[31m\n")
    assert error.startswith("TTFT ")
    assert "·" not in error
    assert set(endpoint.asked[-1]) == {"model", "messages", "stream", "stream_options"}
    found = checked(run("Hi", "--url", endpoint.url, "--model", "m", "-o", "json")[1], "Chat")
    assert (found["usage"], found["workers"], found["handoff"]) == (None, None, None)


def test_thoughts_are_no_part_of_an_answer(run: Run, endpoint: Endpoint) -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}]}
    endpoint.pieces = [f"data: {json.dumps(thought)}\n\n".encode(), *says("Yes.")]
    where = ("Hi", "--url", endpoint.url, "--model", "m")
    assert run(*where, "-q") == (0, "Yes.\n", "")
    found = checked(run(*where, "-o", "json")[1], "Chat")
    assert (found["text"], found["reasoning"]) == ("Yes.", "Hm.")


def test_a_key_opens_an_api(run: Run, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = build(anonymous=Anonymous.NEVER)
    closed.wait_ready()
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    key = httpx.post(f"{closed.admin_url}/admin/v1/keys", headers=admin, json={"tenant": "t"}).json()["key"]
    (tmp_path / "key").write_text(f"{key}\n")
    where = ("Hi", "--url", closed.url, "-q", *GREEDY)
    for more in ((), ("--model", "tiny")):
        code, out, error = run(*where, *more)
        assert (code, out, len(error.splitlines())) == (Exit.AUTH, "", 1)
        assert error.endswith("Name its file with --api-key-file.\n")
    code, out, _ = run(*where, "--key-file", str(tmp_path / "key"))
    assert (code, bool(out)) == (0, True)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert run(*where)[:2] == (0, out)
    monkeypatch.setenv("OPENAI_API_KEY", "tdk-wrong")
    assert "the API key is not valid" in run(*where, "--model", "tiny")[2]


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def test_an_error_is_one_line_and_a_code(run: Run, house: RouterHarness) -> None:
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("--model", "tinny"), Exit.NOT_FOUND, "this cluster serves tandem-tiny, tiny. Name another one with --model."),
        (("--max-tokens", "9999"), Exit.USAGE, "max_tokens is 9999 and the prompt has "),
        (("--temperature", "-1"), Exit.USAGE, "temperature"),
        (("--url", "http://127.0.0.1:1"), Exit.FAILED, "no OpenAI endpoint answers at http://127.0.0.1:1: "),
        (("--url", "http://127.0.0.1:1", "--model", "m"), Exit.FAILED, "Check --url."),
        (
            ("--url", f"{house.url}/nowhere", "--model", "m"),
            Exit.USAGE,
            "nothing is served at /nowhere/v1/chat/completions",
        ),
    ]
    for flags, want, text in cases:
        for form in ((), ("-o", "json")):
            code, out, error = run("Hi", "--url", house.url, *flags, *form)
            assert (code, out, len(error.splitlines())) == (want, "", 1), error
            assert text in error


def test_a_context_that_is_full(run: Run, house: RouterHarness) -> None:
    code, out, error = run("--url", house.url, typed=b"list " * 5000)
    assert (code, out) == (Exit.USAGE, "")
    assert "tokens: this model's context is 4096 tokens, prompt and answer together. Shorten the prompt." in error


@pytest.mark.parametrize(
    ("pieces", "code", "text"),
    [
        ([*says("Hel")[:1], b""], Exit.FAILED, "was lost in the middle of the answer: peer closed connection"),
        (says("Hel")[:1], Exit.FAILED, "was lost in the middle of the answer: the stream has no end. Ask again."),
        ([*says("Hel")[:1], b'data: {"error": {"message": "a worker died.", "code": "worker_lost"}}\n'], 1, "a worker"),
        ([*says("Hel")[:1], b"data: {{\n"], Exit.FAILED, "the endpoint is not an OpenAI API: it sent '{{'"),
    ],
)  # fmt: skip
def test_an_answer_that_breaks_off(run: Run, endpoint: Endpoint, pieces: list[bytes], code: int, text: str) -> None:
    endpoint.pieces = pieces
    found, out, error = run("Hi", "--url", endpoint.url, "--model", "m")
    assert (found, out, len(error.splitlines())) == (code, "Hel\n", 1)
    assert text in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "no question was given"),
        (("",), "no question was given"),
        (("Hi", "--timeout", "0"), "--timeout is 0"),
        (("Hi", "--url", "h:80"), "'h:80' is not the URL of an API"),
        (("\udcff", "--url", "http://127.0.0.1:1", "--model", "m"), "cannot send the given text: it is not UTF-8 text"),
    ],
)
def test_what_cannot_be_asked(run: Run, arguments: tuple[str, ...], text: str) -> None:
    code, out, error = run(*arguments)
    assert (code, out, len(error.splitlines())) == (Exit.USAGE, "", 1)
    assert text in error


# ---- on a terminal -------------------------------------------------------------------------------------------------


def test_a_conversation(endpoint: Endpoint, tmp_path: Path) -> None:
    with Terminal("chat", "--url", endpoint.url, "--model", "m", "--system", "Be brief.") as terminal:

        def said(line: str, then: str) -> None:
            place = len(terminal.shown)
            terminal.type(f"{line}\n")
            terminal.wait_for(PROMPT, after=terminal.wait_for(then, after=place))

        terminal.wait_for(PROMPT, after=terminal.wait_for(f"m at {endpoint.url}. /help shows the commands"))
        said("Hi", "Hello\n\x1b[2mTTFT ")
        assert endpoint.messages() == [("system", "Be brief."), ("user", "Hi")]
        said("two \\\nlines", "Hello\n")
        first = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")]
        assert endpoint.messages() == [*first, ("user", "two \nlines")]
        said("//path", "Hello\n")
        assert endpoint.messages()[-1] == ("user", "/path")
        said("/sytem x", "there is no command '/sytem'. Did you mean '/system'?")
        said("/help", "/save FILE")
        said("/save", "Write /save FILE.")
        said(f"/save {tmp_path}/said.json", "written: ")
        assert json.loads((tmp_path / "said.json").read_text())[:2] == [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        ]  # fmt: skip
        said(f"/save {tmp_path}/said.json", "said.json is there already. Name a file that is not.")
        said(f"/save {tmp_path}/none/said.md", "there is no such folder")
        said(f"/save {tmp_path}/said.md", "written: ")
        assert (
            (tmp_path / "said.md").read_text().startswith("## system\n\nBe brief.\n\n## user\n\nHi\n\n## assistant\n")
        )
        said("/clear", "the conversation is cleared")
        said("/system", "there is no system prompt")
        endpoint.pieces = says("\x1b]0;title\x07", "Bye")
        said(f"{UP * 2}{6 * BACKSPACE}list", "\ufffd]0;title\ufffdBye")
        assert endpoint.messages() == [("user", "list")]
        terminal.type("/quit\n")
        assert terminal.end() == 0


def test_errors_end_no_conversation(house: RouterHarness) -> None:
    with Terminal("chat", "--url", house.url, *GREEDY) as terminal:
        place = terminal.wait_for(PROMPT)
        terminal.type(f"{'list ' * 700}\n")
        for _ in range(5):  # until no more fits
            place = terminal.wait_for(PROMPT, after=terminal.wait_for("ended by length", after=place))
            terminal.type(f"{'list ' * 700}\n")
        terminal.wait_for("/clear begins anew.", after=place)


def test_ctrl_c_stops_an_answer_and_twice_the_program(build: Build) -> None:
    slow = build(script=Script(step_s=0.02))
    slow.wait_ready()
    with Terminal("chat", "--url", slow.url, "--max-tokens", "3000") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("Hi\n")
        wait_for(lambda: slow.workers["decode-0"].said.total() > 10)
        terminal.type(CTRL_C)
        place = terminal.wait_for(PROMPT, after=terminal.wait_for("ended by Ctrl-C"))
        wait_for(lambda: slow.workers["decode-0"].cancels)
        terminal.type(CTRL_C)
        place = terminal.wait_for(PROMPT, after=terminal.wait_for("Ctrl-C again, or Ctrl-D, leaves", after=place))
        terminal.type("/help\n")
        place = terminal.wait_for(PROMPT, after=terminal.wait_for("/save FILE", after=place))
        terminal.type(CTRL_C)
        terminal.wait_for(PROMPT, after=terminal.wait_for("Ctrl-C again, or Ctrl-D, leaves", after=place))
        terminal.type(CTRL_C)
        assert terminal.end() == Exit.INTERRUPTED
    with Terminal("chat", "Hi", "--url", slow.url, "--max-tokens", "3000") as terminal:
        wait_for(lambda: slow.router.dispatcher.flights)
        terminal.type(CTRL_C)
        assert terminal.end() == Exit.INTERRUPTED
    wait_for(lambda: not slow.router.dispatcher.flights)


def test_what_is_kept_of_an_answer_that_ended_early(endpoint: Endpoint) -> None:
    endpoint.pieces = says("Hel")[:1]
    with Terminal("chat", "--url", endpoint.url, "--model", "m") as terminal:
        place = terminal.wait_for(PROMPT)
        terminal.type("One\n")
        place = terminal.wait_for(PROMPT, after=terminal.wait_for("Hel\nthe connection to ", after=place))
        endpoint.is_free.clear()
        terminal.type("Two\n")
        place = terminal.wait_for("Hel", after=place)
        assert endpoint.messages() == [("user", "Two")]
        terminal.type(CTRL_C)
        place = terminal.wait_for(PROMPT, after=terminal.wait_for("ended by Ctrl-C", after=place))
        endpoint.is_free.set()
        terminal.type("Three\n")
        terminal.wait_for(PROMPT, after=place)
        assert endpoint.messages() == [("user", "Two"), ("assistant", "Hel"), ("user", "Three")]
        terminal.type("/quit\n")
        assert terminal.end() == 0


def test_ctrl_d_leaves(endpoint: Endpoint) -> None:
    with Terminal("chat", "--url", endpoint.url, "--model", "m") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.end() == 0
