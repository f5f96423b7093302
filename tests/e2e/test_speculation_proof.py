"""A slice of `make proof NAME=speculation`: drafts change no answer while a decode worker is killed."""

from dataclasses import replace
from pathlib import Path

from proof.record import Record
from proof.speculation.__main__ import ARRANGEMENTS, KILLS, TOGETHER, outcome, tried
from proof.speculation.drafted_requests import SETTINGS, drafted, request
from tests.integration.router.transcript import Choice, Transcript

SEED = 11


def test_answers_with_drafts_are_the_same_after_a_kill(tmp_path: Path) -> None:
    record = Record(tmp_path / "result.json", "speculation", {"seed": SEED})
    tried(record, "decode killed", SEED, range(TOGETHER))
    assert record.content["decode killed"] == {str(number): "same" for number in range(TOGETHER)}
    counted = record.content["counted"]["decode killed"]
    assert counted["accepted"] > 0
    assert counted["again"] > 0


def test_a_difference_is_found() -> None:
    wanted = Transcript({0: Choice(text="one", finishes=["stop"])}, usages=[{}], dones=1)
    assert outcome(wanted, wanted) == "same"
    assert "instead" in outcome(Transcript({0: Choice(text="two", finishes=["stop"])}, usages=[{}], dones=1), wanted)
    assert "instead" in outcome(replace(wanted, usages=[{"total_tokens": 1}]), wanted)
    assert outcome(replace(wanted, errors=[{"code": "lost"}]), wanted).startswith("errors")
    assert outcome(replace(wanted, usages=[]), wanted).startswith("not well formed")


def test_requests_are_of_every_setting_and_source() -> None:
    answer = Transcript({0: Choice(text="a b c d e f g h", finishes=["stop"])})
    every = [request(SEED, number) for number in range(200)]
    assert every == [request(SEED, number) for number in range(200)]
    assert {name for name, _ in every} == {*SETTINGS}
    assert {body["speculative"] for _, body in every} == {False}
    with_drafts = [drafted(SEED, number, body, answer) for number, (_, body) in enumerate(every)]
    predicted = [body["prediction"]["content"] for body in with_drafts if "prediction" in body]
    assert 100 < len(predicted) < 200
    assert 10 < predicted.count("a b c d e f g h") < 100
    assert {*KILLS} < {*ARRANGEMENTS}
