"""Test the comparison with peers: its requests, its rows and the files that all systems read."""

import asyncio
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.load import TimedAnswer
from bench.peers import cases, results, systems
from bench.peers.__main__ import SYSTEMS, parsed
from bench.peers.cases import CASES, Case, Figures
from bench.peers.gguf_types import requantise
from bench.report import Row

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prompts_share_the_prefix_of_their_case_alone(case: Case) -> None:
    every = cases.prompts(case, 0)
    assert len(every) == case.requests + bool(case.shared_tokens)
    assert {len(prompt) for prompt in every} == {case.shared_tokens + case.prompt_tokens}
    assert len({tuple(prompt[: case.shared_tokens]) for prompt in every}) == 1
    assert len({tuple(prompt[case.shared_tokens :][:16]) for prompt in every}) == len(every)
    assert cases.prompts(case, 0) == every
    assert all(prompt not in every for prompt in cases.prompts(case, 1))


def test_cases_share_no_prompt() -> None:
    starts = [tuple(prompt[:16]) for case in CASES.values() for prompt in cases.prompts(case, 0)[-1:]]
    assert len(set(starts)) == len(CASES)


class Server:
    """Streams as many tokens as are asked for, and keeps the prompts and the most requests at once."""

    def __init__(self, made: int | None = None) -> None:
        self.made, self.prompts, self.open, self.most = made, list[list[int]](), 0, 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, with its usage in an event of its own."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = json.loads(await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])))
        self.prompts.append(body["prompt"])
        self.open += 1
        self.most = max(self.most, self.open)
        made = self.made or body["max_tokens"]
        writer.write(HEAD + b'data: {"choices": [{"text": "a"}]}\n\n' * made)
        writer.write(b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n' % made)
        await writer.drain()
        self.open -= 1
        writer.close()

    async def measured(self, case: Case) -> list[TimedAnswer]:
        """The answers to a case's requests."""
        async with await asyncio.start_server(self.answer, "127.0.0.1", 0) as server:
            return await cases.measure(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", case, 0, 5)

    async def warmed(self) -> None:
        """Warm up."""
        async with await asyncio.start_server(self.answer, "127.0.0.1", 0) as server:
            await cases.warm(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 5)


@pytest.mark.parametrize(
    ("case", "counted", "sent"),
    [
        (Case(clients=3, prompt_tokens=20, requests=7), 7, 7),
        (Case(clients=1, prompt_tokens=20, requests=2, shared_tokens=30), 2, 3),
        (Case(rate=1000.0, prompt_tokens=20, requests=4), 4, 4),
    ],
)
def test_every_request_of_a_case_is_sent_once(case: Case, counted: int, sent: int) -> None:
    server = Server()
    answers = asyncio.run(server.measured(case))
    assert (len(answers), len(server.prompts)) == (counted, sent)
    assert sorted(server.prompts) == sorted(cases.prompts(case, 0))
    assert server.most <= (case.clients or case.requests)


def test_a_server_that_stops_early_is_not_measured() -> None:
    asyncio.run(Server().warmed())
    with pytest.raises(SystemExit, match="made 4 tokens where 5 were asked for"):
        asyncio.run(Server(made=4).warmed())


def test_figures_count_tokens_over_the_whole_time() -> None:
    figures = Figures()
    figures.add([TimedAnswer(0.0, [1.0, 1.2, 1.4]), TimedAnswer(0.5, [1.0, 2.0, 3.0, 3.0])], 3)
    figures.add([TimedAnswer(10.0, [13.0, 13.5, 14.0])], 3)
    assert figures.ttft_ms == pytest.approx([1000, 500, 3000])
    assert figures.token_ms == pytest.approx([200, 1000, 500])
    value, unit = figures.medians()["tokens"]
    assert (value, unit) == (9 / 7, "tokens/s")


def test_each_peer_is_a_limit() -> None:
    medians = {"Tandem 1+1": {"TTFT p50": (20.0, "ms")}, "llama.cpp": {"TTFT p50": (40.0, "ms")}}
    rows = list(results.rows_of("int4: a", medians))
    assert [row.metric for row in rows] == ["Tandem 1+1: TTFT p50, of llama.cpp's", "llama.cpp: TTFT p50"]
    assert [row.ratio for row in rows] == [0.5, None]
    alone = list(results.rows_of("int4: a", {"Tandem 1+1": {"TTFT p50": (20.0, "ms")}}))
    assert alone == [Row("int4: a", "Tandem 1+1: TTFT p50", 20.0, "ms")]
    assert results.values(rows) == {"int4": {"TTFT p50, ms": {"a": {"Tandem 1+1": 20.0, "llama.cpp": 40.0}}}}


def test_a_case_that_runs_again_replaces_its_rows() -> None:
    old = [Row("a", "x", 1.0, "ms"), Row("b", "x", 2.0, "ms"), Row("b", "y", 2.0, "ms")]
    assert results.merged(old, [Row("b", "x", 3.0, "ms")]) == [old[0], Row("b", "x", 3.0, "ms")]


def test_a_picture_is_drawn_where_systems_lack_cases(tmp_path: Path) -> None:
    rows = [Row("int4: a", "llama.cpp: TTFT p50", 1.0, "ms"), Row("bf16: b", "Tandem mixed: TTFT p50", 2.0, "ms"),
            Row("bf16: b", "Tandem mixed: tokens", 3.0, "tokens/s")]  # fmt: skip
    results.draw(rows, tmp_path / "some.svg")
    assert "int4: TTFT p50, ms" in (text := (tmp_path / "some.svg").read_text())
    assert "bf16: tokens, tokens/s" in text


def test_arguments_choose_a_part() -> None:
    chosen = parsed(["--formats", "int8", "--cases", "1x400", "open", "--systems", "1+1", "llama", "--turns", "1"])
    assert (chosen.formats, chosen.cases, chosen.systems, chosen.turns) == (
        ["int8"],
        ["1x400", "open"],
        ["1+1", "llama"],
        1,
    )
    assert parsed([]).cases == list(CASES)
    with pytest.raises(SystemExit):
        parsed(["--cases", "2x2"])


def test_a_system_that_is_not_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "find_spec", lambda name: None)
    assert list(systems.servers(None)) == list(systems.TANDEM)
    assert systems.servers(Path("/opt/llama-server"))[systems.LLAMA_BUILT] == ("/opt/llama-server",)
    monkeypatch.setattr(systems, "find_spec", lambda name: object())
    assert set(systems.servers(Path("server"))) <= set(SYSTEMS.values())
    assert systems.LLAMA in systems.servers(None)


def test_copies_of_a_model_keep_metadata_and_vectors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "bc"])
    numbers, kind = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("matrix", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("vector", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    requantise(tmp_path / "one.gguf", "BF16", tmp_path / "two.gguf")
    before, after = gguf.GGUFReader(tmp_path / "one.gguf"), gguf.GGUFReader(tmp_path / "two.gguf")
    assert [(f.name, f.contents()) for f in after.fields.values() if not f.name.startswith("GGUF.")] == [
        (f.name, f.contents()) for f in before.fields.values() if not f.name.startswith("GGUF.")
    ]
    assert [tensor.tensor_type.name for tensor in after.tensors] == ["BF16", "F32"]
    found, expected = (
        gguf.quants.dequantize(one.tensors[0].data, one.tensors[0].tensor_type) for one in (after, before)
    )
    assert np.abs(found - expected).max() <= 1 / 256
    assert np.array_equal(after.tensors[1].data, numbers[0])
