"""Keys, records, events and the desired state: what stands in Redis, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.block_hash import BlockHash
from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import cordoned
from tandem.core.errors import ConfigError
from tandem.core.ids import Incarnation, RouterId, WorkerId
from tandem.core.rollouts import started
from tandem.core.state_enums import RoleName
from tandem.rpc.v1 import worker_pb2
from tandem.statestore.index.events import MEMBER_BYTES, fold, member, members
from tandem.statestore.keys import Keys, Member
from tandem.statestore.records import RouterRecord, WorkerRecord, to_json
from tandem.statestore.stores import desired as desired_store

hashes = st.binary(min_size=16, max_size=16).map(BlockHash)


def test_every_key_is_in_the_namespace_and_a_workers_keys_share_a_tag() -> None:
    keys = Keys("demo")
    worker = WorkerId("w-1")
    own = [keys.lease(Member.WORKER, worker), keys.events(worker, Incarnation(5)), keys.blocks(worker, Incarnation(5))]
    for key in [*own, keys.members(Member.ROUTER), keys.desired, keys.desired_channel]:
        assert key.startswith("tandem:demo:")
    assert all("{w-1}" in key for key in own)
    assert len(set(own)) == 3


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a{b}", "x" * 129, "a\n"])
def test_names_that_could_escape_their_key_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        Keys(name)
    with pytest.raises(ConfigError):
        Keys("demo").lease(Member.WORKER, name)


def worker_record() -> WorkerRecord:
    return WorkerRecord(
        worker=WorkerId("w1"), incarnation=Incarnation(2**63 - 1), role="decode", address="10.0.0.1:4000", model="m",
        fingerprint="f", tp=2, block_tokens=32, kv_dtype="bfloat16", max_model_len=4096, vocab_size=5, num_blocks=(7,),
        token_kv_bytes=64, transports=("shm", "tcp"), protocol=3, eos_token_ids=(1, 2), pid=9, rank_pids=(10, 11),
    )  # fmt: skip


def test_records_survive_json() -> None:
    assert WorkerRecord.from_json(to_json(worker_record())) == worker_record()
    router = RouterRecord(router=RouterId("r"), incarnation=Incarnation(3), http_address="h:80")
    assert RouterRecord.from_json(to_json(router).encode()) == router


def test_a_worker_record_has_the_fields_of_the_message() -> None:
    names = [field.name for field in worker_pb2.WorkerInfo.DESCRIPTOR.fields]
    for told_on_the_stream in ("profile", "host"):  # to routers that plan with it
        names.remove(told_on_the_stream)
    assert list(json.loads(to_json(worker_record()))) == names


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"tp": "2"}, "tp"), ({"tp": True}, "tp"), ({"transports": [1]}, "transports"), ({"worker": None}, "worker")],
)
def test_wrong_records_are_refused_by_field(change: dict[str, object], reason: str) -> None:
    raw = {**json.loads(to_json(worker_record())), **change}
    with pytest.raises(ValueError, match=reason):
        WorkerRecord.from_json(json.dumps(raw))


def test_missing_fields_are_named_and_unknown_ones_ignored() -> None:
    raw = json.loads(to_json(worker_record()))
    assert WorkerRecord.from_json(json.dumps({**raw, "later": 1})) == worker_record()
    del raw["fingerprint"]
    with pytest.raises(ValueError, match="fingerprint"):
        WorkerRecord.from_json(json.dumps(raw))
    with pytest.raises(ValueError):
        WorkerRecord.from_json("[]")


@given(st.lists(st.tuples(st.integers(0, 255), hashes)))
def test_members_survive_concatenation(blocks: list[tuple[int, BlockHash]]) -> None:
    blob = b"".join(member(group, block) for group, block in blocks)
    assert len(blob) == MEMBER_BYTES * len(blocks)
    assert list(members(blob)) == blocks


@given(st.sets(hashes))
def test_the_digest_of_the_first_group_is_the_xor_of_its_hashes(blocks: set[BlockHash]) -> None:
    expected = 0
    for block in blocks:
        expected ^= int.from_bytes(block, "little")
    folded = fold(0, [member(0, block) for block in blocks])
    assert folded == expected
    assert fold(folded, [member(0, block) for block in blocks]) == 0


@given(hashes.filter(any))
def test_the_same_hash_in_two_groups_does_not_cancel_out(block: BlockHash) -> None:
    assert fold(0, [member(0, block), member(1, block)]) != 0


@pytest.mark.parametrize(("group", "block"), [(256, b"x" * 16), (-1, b"x" * 16), (0, b"x" * 15)])
def test_malformed_blocks_are_refused(group: int, block: bytes) -> None:
    with pytest.raises(ValueError):
        member(group, BlockHash(block))


def test_desired_state_survives_json() -> None:
    pool = Pool(name="p", model="m", role=RoleName.MIXED, count=2, revision="r", tp=2, hardware="h200")
    plain = DesiredState(version=4, pools=(pool,), is_stopped=True)
    state = cordoned(replace(plain.filled(), max_ranks=8), "p-1", is_cordoned=True, deadline_s=4.5)
    assert desired_store.from_json(desired_store.to_json(state)) == state
    assert desired_store.from_json(desired_store.to_json(plain)) == plain.filled()
    rolling = started(replace(state, is_stopped=False), model_path="/next", settings={"worker.chunk_tokens": "64"})
    assert desired_store.from_json(desired_store.to_json(rolling)) == rolling


def test_the_record_of_a_release_that_knew_no_members_gets_them() -> None:
    pool = {"name": "p", "model": "m", "role": "mixed", "count": 2}
    state = desired_store.from_json(json.dumps({"version": 1, "pools": [pool], "is_stopped": False}))
    assert [member.worker_id for member in state.members] == ["p-0", "p-1"]


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("members", {"worker_id": 7}),
        ("members", {"is_cordoned": "no"}),
        ("members", {"restart_generation": True}),
        ("members", {"revision": None}),
        ("members", {"moons": 2}),
        ("pools", {"count": 1.0}),
        ("pools", {"count": 10**9}),
        ("pools", {"name": ["p"]}),
        ("", {"version": float("inf")}),
        ("", {"max_ranks": "6"}),
        ("", {"revisions": [{"name": "r2", "model": "m", "settings": {"worker.chunk_tokens": 64}}]}),
        ("", {"revisions": ["r2"]}),
        ("", {"rollouts": [{"model": "m", "revision": "r2", "previous": "r1", "sizes": {"p": 1}, "phase": "flying"}]}),
        ("", {"rollouts": [{"model": "m", "revision": "r2", "previous": "r1", "sizes": {"p": "1"}, "phase": "done"}]}),
        ("", {"members": ["p-0"]}),
    ],
)
def test_values_of_another_kind_are_refused(where: str, change: dict[str, Any]) -> None:
    pool = Pool(name="p", model="m", role=RoleName.MIXED, count=1)
    record = json.loads(desired_store.to_json(DesiredState(version=1, pools=(pool,)).filled()))
    assert desired_store.from_record(record).member("p-0") is not None
    (record[where][0] if where else record).update(change)
    with pytest.raises((TypeError, ValueError)):
        desired_store.from_record(record)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version":1,"pools":[{"role":"x"}],"is_stopped":false}'])
def test_broken_desired_state_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        desired_store.from_json(text)
