"""Plan of one case of the wire part, drawn from seed and index alone: the ends, then waves of moves with faults."""

from __future__ import annotations

import random
from dataclasses import dataclass

from proof.transfer.shapes import BLOCK_TOKENS, NUM_BLOCKS, SMALL

TRANSPORTS = ("shm", "tcp", "grpc", "gloo", "cpu_ipc")
TPS = (1, 2, 4)
TRANSFERS = 40
"""Transfers of one case, over the same links."""
MAX_BLOCKS = 12
"""Blocks of one transfer, at the larger block size of the two ends."""
HARMLESS = ("none", "duplicate", "stale_attempt", "shuffle", "slow_receiver")
"""Faults that a transfer must survive."""
LETHAL = (
    "flip_payload", "flip_header", "truncate", "drop", "wrong_source_incarnation", "wrong_dest_incarnation",
)  # fmt: skip
"""After one of these hit, the receiving rank must not verify."""
OPEN_ENDED = (
    "finish_first", "old_incarnation_too", "link_down", "cancel_sender", "cancel_receiver", "late", "new_incarnation",
)  # fmt: skip
"""Either outcome is allowed, as long as there is one and nothing wrong is admitted. "late": frames are held back, the
transfer is given up, and the frames arrive among those of the next one, which gets the same blocks."""
NETWORK = ("network_flip", "network_cut")
BREAKING = ("flip_header", "truncate", "link_down", *NETWORK)
"""These end a connection; its sender may notice only when it uses the link again."""
KINDS = (*HARMLESS, *LETHAL, *OPEN_ENDED, *NETWORK)
PROXIED = ("tcp", "grpc")
"""Transports with a network in between, that can be broken."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`source_rank`: the sending rank of the frames it hits; `at`: the how many-th data frame (or write, or network
    byte); `place`: where in the frame, from 0 to 1."""

    kind: str
    source_rank: int = 0
    at: int = 0
    place: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One transfer. `hit`: the part of the prompt that the receiver holds already. `layer_step` 0 = all at once,
    `chunk_blocks` 0 = all at once; `same_blocks`: takes over the blocks of the transfer before it."""

    tokens: int
    hit: float
    layer_step: int
    chunk_blocks: int
    fault: Fault
    same_blocks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The two ends of a case."""

    transport: str
    shape: str
    source_tp: int
    dest_tp: int
    source_tokens: int
    dest_tokens: int
    through_proxy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Waves run one after another, the transfers of a wave together."""

    name: str
    setting: Setting
    waves: tuple[tuple[Move, ...], ...]

    @property
    def transfers(self) -> int:
        return sum(map(len, self.waves))


def faults_of(transport: str) -> tuple[str, ...]:
    """Faults that transfers over this transport can have."""
    kinds = KINDS if transport in PROXIED else tuple(kind for kind in KINDS if kind not in NETWORK)
    return tuple(kind for kind in kinds if kind != "none")


def draw(seed: int, index: int) -> Case:
    """The case of this number."""
    rng = random.Random(f"{seed}/wire/{index}")
    transport = TRANSPORTS[index % len(TRANSPORTS)]
    shape = "wide" if rng.random() < 0.06 else rng.choice(SMALL)
    tokens = rng.choice(BLOCK_TOKENS)
    setting = Setting(
        transport=transport,
        shape=shape,
        source_tp=rng.choice((1, 1, 2, 4)),
        dest_tp=rng.choice((1, 1, 2, 4)),
        source_tokens=tokens,
        dest_tokens=tokens if rng.random() < 0.6 else rng.choice(BLOCK_TOKENS),
        through_proxy=transport in PROXIED and rng.random() < 0.2,
    )
    waves, left = [], TRANSFERS
    while left:
        wave = _wave(rng, setting, min(left, rng.choice((1, 1, 2, 3))))
        waves.append(wave)
        left -= len(wave)
        if wave[-1].fault.kind == "late" and left:
            waves.append((_move(rng, setting, _fault(rng, setting, ("none", "duplicate")), same_blocks=True),))
            left -= 1
    return Case(name=f"wire/{index}", setting=setting, waves=tuple(waves))


def _wave(rng: random.Random, setting: Setting, size: int) -> tuple[Move, ...]:
    kinds = HARMLESS + LETHAL + OPEN_ENDED + (NETWORK * 3 if setting.through_proxy else ())
    faults = [_fault(rng, setting, kinds if rng.random() < 0.75 else ("none",)) for _ in range(size)]
    lonely = next((fault for fault in faults if fault.kind in ("late", "new_incarnation", *NETWORK)), None)
    return tuple(_move(rng, setting, fault) for fault in ([lonely] if lonely else faults))


def _fault(rng: random.Random, setting: Setting, kinds: tuple[str, ...]) -> Fault:
    kind = rng.choice(kinds)
    at = rng.randrange(30_000) if kind == "network_flip" else min(int(rng.expovariate(0.5)), 12)
    return Fault(kind, rng.randrange(setting.source_tp), at, rng.random())


def _move(rng: random.Random, setting: Setting, fault: Fault, *, same_blocks: bool = False) -> Move:
    most = MAX_BLOCKS * min(setting.source_tokens, setting.dest_tokens)
    return Move(
        tokens=rng.randint(1, most),
        hit=rng.choice((0.0, 0.0, 0.0, 0.5, 0.5, 1.0)),
        layer_step=rng.choice((0, 1, 2)),
        chunk_blocks=rng.choice((0, 1, 2, 5)),
        fault=fault,
        same_blocks=same_blocks,
    )


def matrix() -> list[Case]:
    """Every TP pairing, over every transport, with every kind of layout: chunked or not, at three hit ratios."""
    cases = []
    for transport in TRANSPORTS:
        for source_tp in TPS:
            for dest_tp in TPS:
                for shape in SMALL:
                    setting = Setting(
                        transport=transport, shape=shape, source_tp=source_tp, dest_tp=dest_tp,
                        source_tokens=16, dest_tokens=16,
                    )  # fmt: skip
                    moves = [
                        Move(
                            tokens=160 + 16 * extra, hit=hit, layer_step=chunk, chunk_blocks=chunk, fault=Fault("none")
                        )
                        for chunk in (0, 1)
                        for hit, extra in ((0.0, 0), (0.5, 2), (1.0, 1))
                    ]
                    name = f"matrix/{transport}-{source_tp}x{dest_tp}-{shape}"
                    cases.append(Case(name=name, setting=setting, waves=tuple((move,) for move in moves)))
    return cases


assert 3 * MAX_BLOCKS <= NUM_BLOCKS
