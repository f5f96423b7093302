"""A worker's knowledge of the speed to another one, and its reports of its links."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, Rank, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVLayout
from tandem.core.link_speed import LinkSpeed, ReportedLink
from tandem.core.proto_mapping import from_proto, to_proto
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.rpc.v1 import engine_pb2 as e
from tandem.workercore.load_meter import LOOK_EVERY_S, LinkNews
from tandem.workercore.outbox import Outbox
from tandem.workercore.requests import RequestTable
from tandem.workercore.role_interface import RoleContext

D0 = WorkerId("d0")
TCP = LinkSpeed(from_host="a", to_host="b", transport="tcp", peer="d0", bytes_per_s=1e9, latency_s=1e-4)
LINK = ReportedLink(
    rank=Rank(0), peer=D0, peer_rank=Rank(0), transport="grpc", reason="r", stalls=3, from_host="a", to_host="b",
    bytes_per_s=5e7, latency_s=2e-4, achieved_bytes_per_s=4e7, unused=("tcp failed: no",),
)  # fmt: skip


class Links:
    """A sending end that has links and nothing else."""

    def __init__(self) -> None:
        self.now: tuple[ReportedLink, ...] = ()

    def links(self) -> tuple[ReportedLink, ...]:
        return self.now


def shell(sender: Any, clock: ManualClock, speeds: LinkSpeeds | None, sent: list[e.RankToHost]) -> RoleContext:
    absent: Any = None
    return RoleContext(
        worker=WorkerId("p0"), incarnation=Incarnation(1), profile=absent, host="a", engine=absent, receiver=absent,
        sender=sender, requests=RequestTable(5.0), clock=clock, speeds=speeds,
        outbox=Outbox(lambda data: sent.append(e.RankToHost.FromString(data))),
    )  # fmt: skip


def other(**changes: Any) -> ReportedLink:
    return replace(LINK, **changes)


def test_codecs_are_offered_on_slow_links_and_links_are_not_asked_for_nothing() -> None:
    sender, clock = Links(), ManualClock()
    here = shell(sender, clock, LinkSpeeds(clock), [])
    here.profile = KVProfile(
        fingerprint="", identity=(), layout=KVLayout(groups=()), offers=("int8",), offers_below_bytes_per_s=1e8
    )
    assert here.offers_to(D0) == ()  # it was not measured
    sender.now = (LINK,)
    assert here.offers_to(D0) == ("int8",)
    sender.now = (other(bytes_per_s=1e9),)
    assert here.offers_to(D0) == ()
    here.profile = replace(here.profile, offers=())
    sender.links = lambda: pytest.fail("asked for links")  # type: ignore[method-assign]
    assert here.offers_to(D0) == ()


def test_the_link_in_use_counts_before_what_the_hosts_could_do() -> None:
    sender, clock = Links(), ManualClock()
    speeds = LinkSpeeds(clock)
    here = shell(sender, clock, speeds, [])
    assert here.link_speed(D0) is None
    speeds.learn([TCP])
    assert here.link_speed(D0) == 1e9
    assert here.link_speed(WorkerId("d1")) is None
    sender.now = (LINK, other(peer=WorkerId("d1"), bytes_per_s=1.0), other(rank=1, bytes_per_s=2.0))
    assert here.link_speed(D0) == 5e7
    sender.now = (other(transport="", bytes_per_s=0.0),)  # it dials
    assert here.link_speed(D0) == 1e9
    assert shell(sender, clock, None, []).link_speed(D0) is None


def test_measurements_are_told_once_and_links_looked_at_now_and_then() -> None:
    sender, clock, sent = Links(), ManualClock(), list[e.RankToHost]()
    speeds = LinkSpeeds(clock)
    news = LinkNews(shell(sender, clock, speeds, sent))
    assert news.links() == []
    sender.now = (LINK,)
    assert news.links() == []  # not again so soon
    clock.advance(LOOK_EVERY_S)
    assert [from_proto(ReportedLink, link) for link in news.links()] == [LINK]
    sender.now = ()
    speeds.note(TCP)
    news.publish()
    news.publish()
    assert [from_proto(LinkSpeed, message.link_measured) for message in sent] == [TCP]
    assert news.links() == []  # something was measured: there is news
    news.learn(e.LinkSpeeds(rows=[to_proto(e.LinkMeasured, TCP)]))
    news.publish()
    assert len(sent) == 1
