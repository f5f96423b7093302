"""Pairs of workers, their forms, and the texts of refusals: every rule on its own, symmetry by hypothesis."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.block_hash import HashRoot
from tandem.core.errors import PairRefusedError
from tandem.core.ids import GroupId
from tandem.core.kv_compatibility import (
    ALWAYS_BYTES_PER_S,
    PROTOCOL,
    KVProfile,
    agree,
    describe,
    lossy_name,
    offers_for,
    protocol_refusal,
    refusal,
)
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.kvtransfer.wire import profile_from_wire, profile_to_wire
from tandem.rpc.v1 import worker_pb2 as w

IDENTITY = {"model": "m", "revision": "r1", "compute_dtype": "float32"}


def group(**changes: Any) -> KVGroupSpec:
    plain = KVGroupSpec(
        group=GroupId(0), layers=(0, 1), planes=2, heads=4, width=8, block_tokens=16, dtype="float32"
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def profile(*groups: KVGroupSpec, tp: int = 1, identity: dict[str, str] | None = None, **more: Any) -> KVProfile:
    who = tuple(sorted((identity or IDENTITY).items()))
    layout = KVLayout(groups=groups or (group(),), tp=tp)
    return KVProfile(fingerprint=str(hash(who)), identity=who, layout=layout, **more)


EQUAL = profile()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (profile(protocol=(PROTOCOL[0] + 1, 0)), ("protocol differs: 2.0 and 3.0", "update the older worker")),
        (profile(identity={**IDENTITY, "revision": "r2"}), ("revision differs: r1 and r2", "serve the same model")),
        (profile(identity={**IDENTITY, "compute_dtype": "bfloat16"}), ("compute dtype differs: float32 and bfloat16",)),
        (profile(identity={"model": "m", "revision": "r1"}), ("compute dtype differs: float32 and none",)),
        (profile(group(), group(group=GroupId(1))), ("KV groups differ: 1 and 2",)),
        (profile(group(heads=8)), ("KV group 0 differs in shape",)),
        (profile(group(window=128)), ("KV group 0 differs in shape",)),
        (profile(group(is_replicated=True)), ("KV group 0 differs in shape",)),
        (profile(group(dtype="int4")), ("cannot be converted: float32 and int4", "--kv-dtype")),
        (profile(group(block_tokens=0)), ("blocks of 16 and 0 tokens",)),
        (profile(transports=("grpc",)), ("no common transport: shm, tcp and grpc", "--transport")),
    ],
)
def test_refusals_name_what_differs_and_what_to_do(other: KVProfile, words: tuple[str, ...]) -> None:
    mine = dataclasses.replace(EQUAL, transports=("shm", "tcp"))
    why = refusal(mine, other)
    assert [word for word in words if word not in why] == [], why
    assert ";" in why  # the fix follows
    with pytest.raises(PairRefusedError, match="cannot exchange KV"):
        agree(mine, other)


def test_workers_of_two_revisions_never_work_together() -> None:
    """With all else equal; a worker without a revision fits all. The revision is sent on the wire."""
    one, other = (dataclasses.replace(EQUAL, revision=name) for name in ("initial", "r2"))
    assert refusal(one, other).startswith("revision differs: initial and r2;")
    with pytest.raises(PairRefusedError, match="revision differs"):
        agree(one, other)
    assert refusal(one, one) == refusal(one, EQUAL) == refusal(EQUAL, other) == ""
    assert profile_from_wire(w.KvProfile.FromString(profile_to_wire(other).SerializeToString())) == other


def test_unequal_fingerprints_without_named_fields() -> None:
    other = dataclasses.replace(EQUAL, fingerprint="f2")
    assert f"fingerprint differs: {EQUAL.fingerprint} and f2" in refusal(EQUAL, other)


@pytest.mark.parametrize(
    ("other", "lossy", "words"),
    [
        (profile(), "", "exact"),
        (profile(tp=4), "", "exact"),
        (profile(group(block_tokens=8)), "", "re-blocked 16 to 8"),
        (profile(group(block_tokens=24)), "", "re-blocked 16 to 24"),
        (profile(group(dtype="bfloat16")), "float32>bfloat16", "converted float32 to bfloat16"),
        (profile(group(dtype="float16", block_tokens=8)), "float32>float16",
         "re-blocked 16 to 8, converted float32 to float16"),
        (profile(protocol=(PROTOCOL[0], 7)), "", "exact"),
        (profile(codecs=()), "", "exact"),
        (profile(transports=()), "", "exact"),
    ],
)  # fmt: skip
def test_what_may_differ(other: KVProfile, lossy: str, words: str) -> None:
    assert refusal(EQUAL, other) == ""
    form = agree(EQUAL, other)
    assert form.dtypes == tuple(g.dtype for g in other.layout.groups)
    assert (form.codec, form.lossy) == ("", lossy)
    assert form.protocol == PROTOCOL
    assert describe(EQUAL, other) == words


def test_minor_versions_speak_the_smaller_one() -> None:
    newer = profile(protocol=(PROTOCOL[0], 7))
    assert agree(newer, EQUAL).protocol == agree(EQUAL, newer).protocol == PROTOCOL
    assert agree(newer, profile(protocol=(PROTOCOL[0], 5))).protocol == (PROTOCOL[0], 5)
    assert protocol_refusal((2, 0), (2, 9)) == ""


def test_the_first_offered_codec_that_both_know() -> None:
    other = profile(group(dtype="bfloat16"), codecs=("fp8",))
    form = agree(EQUAL, other, offered=("int8", "fp8"))
    assert (form.codec, form.lossy) == ("fp8", "float32>bfloat16+fp8")
    assert describe(EQUAL, other, offered=("int8", "fp8")) == "converted float32 to bfloat16, codec fp8"
    assert agree(EQUAL, other, offered=("int8",)).codec == ""
    assert agree(EQUAL, EQUAL, offered=("unheard-of",)).codec == ""


@pytest.mark.parametrize(
    ("below", "speed", "expected"),
    [
        (125e6, None, ()),
        (125e6, 124e6, ("int8",)),
        (125e6, 125e6, ()),
        (0.0, 1.0, ()),
        (ALWAYS_BYTES_PER_S, None, ("int8",)),
        (float("inf"), 1e11, ("int8",)),
    ],
)
def test_codecs_are_for_links_measured_slow(below: float, speed: float | None, expected: tuple[str, ...]) -> None:
    assert offers_for(profile(offers=("int8",), offers_below_bytes_per_s=below), speed) == expected


def test_lossy_copies_never_share_a_hash_root_with_exact_ones() -> None:
    names = {
        lossy_name(profile(group(dtype=a)), profile(group(dtype=b)), offered=offered)
        for a in ("float32", "bfloat16", "float16") for b in ("float32", "bfloat16", "float16")
        for offered in ((), ("int8",), ("fp8",))
    }  # fmt: skip
    assert "" in names
    roots = {HashRoot(fingerprint="f", block_tokens=16, lossy=name).digest() for name in names}
    assert len(roots) == len(names) == 3 * 7  # six conversions or none, times two codecs or none


dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int4"])
specs = st.builds(
    group, heads=st.sampled_from([1, 4]), block_tokens=st.sampled_from([0, 8, 16, 24]), dtype=dtypes,
    window=st.sampled_from([None, 128]),
)  # fmt: skip
profiles = st.builds(
    lambda spec, tp, identity, **more: profile(spec, tp=tp, identity=identity, **more),
    spec=specs,
    tp=st.sampled_from([1, 2, 4]),
    identity=st.sampled_from([IDENTITY, {**IDENTITY, "revision": "r2"}]),
    protocol=st.tuples(st.sampled_from([2, 3]), st.integers(0, 7)),
    codecs=st.sampled_from([(), ("int8",), ("fp8",), ("int8", "fp8")]),
    transports=st.sampled_from([(), ("shm",), ("tcp",), ("shm", "tcp")]),
    offers=st.sampled_from([(), ("int8",)]),
    offers_below_bytes_per_s=st.sampled_from([0.0, 125e6, ALWAYS_BYTES_PER_S]),
)


@given(profiles, profiles)
def test_refusal_is_mutual_and_so_is_the_protocol(one: KVProfile, other: KVProfile) -> None:
    assert bool(refusal(one, other)) == bool(refusal(other, one))
    if refusal(one, other):
        return
    there, back = agree(one, other, offered=("int8",)), agree(other, one, offered=("int8",))
    assert there.protocol == back.protocol
    assert there.codec == back.codec
    assert bool(there.lossy) == bool(back.lossy)
    assert there.lossy == lossy_name(one, other, offered=("int8",))
    assert (there.lossy == "") == (not there.codec and [g.dtype for g in one.layout.groups] == list(there.dtypes))


@given(profiles)
def test_profiles_cross_the_wire_whole_and_pair_with_themselves(one: KVProfile) -> None:
    message = w.KvProfile.FromString(profile_to_wire(one).SerializeToString())
    assert profile_from_wire(message) == one
    if one.layout.groups[0].block_tokens:
        assert refusal(one, one) == ""
