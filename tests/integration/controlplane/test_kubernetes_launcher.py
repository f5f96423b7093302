"""A controller over an emulated cluster: changes of the record take effect, and so do others' changes of the pods."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tandem.controlplane.kubernetes import launcher as launcher_module
from tandem.controlplane.kubernetes.adoption import Homes
from tandem.controlplane.kubernetes.pods import COST, LOWEST_COST, ROLE
from tandem.core.desired_changes import cordoned, restarted, with_role, with_scale
from tandem.core.events import EventKind
from tests.integration.controlplane.kubernetes_rig import HOMES, D, P, Scene, play
from tests.integration.deploy.emulated import TOKEN
from tools.waiting import wait_for_async

DECODE = "demo-worker-decode"


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(launcher_module, "LOOK_EVERY_S", 0.1)
    return tmp_path


def test_pods_that_helm_installed_become_the_members_that_are_configured(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)

    found = play(account, scene)
    assert not [write for write in found.cluster.writes if write[0] == DECODE], "no scale was written"
    assert found.events.of(EventKind.STARTED) == [], "nobody starts a pod by its name"


def test_fewer_pods_than_are_configured_are_made_more_and_pods_on_top_are_kept(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(2, 4)

    play(account, scene, prefill=2, decode=1, there=(1, 4))


def test_a_scale_adds_pods_and_takes_away_those_that_were_drained(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        await seen.record.wish(lambda state: with_scale(state, {D: 5}, {}))
        await seen.settled(1, 5)
        before = seen.members()
        await seen.record.wish(lambda state: with_scale(state, {D: 2}, {}))
        victims = before - seen.members()
        await seen.settled(1, 2)
        assert set(seen.cluster.ended) == victims, "those who were chosen left, and nobody else"

    found = play(account, scene)
    assert found.kubelet.cut_off == []
    counts = [count for name, count in found.cluster.writes if name == DECODE]
    assert (counts[0], counts[-1]) == ("5", "2")


def test_only_a_victim_is_marked_as_the_cheapest(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        await seen.record.wish(lambda state: with_scale(state, {D: 2}, {}))
        await seen.settled(1, 2)

    found = play(account, scene)
    marked = {name for name, patch in found.cluster.writes if COST in patch}
    assert marked == set(found.cluster.ended)
    assert any(LOWEST_COST in patch for _, patch in found.cluster.writes)


def test_a_flip_needs_no_other_pod_and_the_label_follows(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        worker = sorted(seen.members())[0]
        pods = set(seen.cluster.live())
        await seen.record.wish(lambda state: with_role(state, worker, P))
        await seen.settled(2, 2)
        assert set(seen.cluster.live()) == pods
        await wait_for_async(lambda: seen.cluster.pods[worker]["metadata"]["labels"][ROLE] == "prefill")
        # It is scaled away: that is the scale of the Deployment that it came from.
        await seen.record.wish(lambda state: cordoned(state, worker, is_cordoned=True))
        await seen.record.wish(lambda state: with_scale(state, {P: 1}, {}))
        await seen.settled(1, 2)
        assert seen.cluster.ended == [worker]
        assert seen.cluster.deployments[DECODE]["replicas"] == 2

    play(account, scene)


def test_a_drained_worker_stays_and_works_again_when_it_is_wanted(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        worker = sorted(seen.members())[0]
        await seen.record.wish(lambda state: cordoned(state, worker, is_cordoned=True))
        await wait_for_async(lambda: seen.kubelet.workers[worker].state == "drained")
        await seen.record.wish(lambda state: cordoned(state, worker, is_cordoned=False))
        await seen.settled(1, 3)

    assert play(account, scene).cluster.ended == []


def test_a_restart_is_another_pod_in_its_place(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        worker = sorted(seen.members())[0]
        await seen.record.wish(lambda state: restarted(state, worker))
        await wait_for_async(lambda: worker in seen.cluster.ended)
        await seen.settled(1, 3)
        assert worker not in seen.members()

    found = play(account, scene)
    assert (len(found.cluster.ended), found.kubelet.cut_off) == (1, [])


def test_what_others_do_to_pods_and_scales_is_followed(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        gone = sorted(seen.members())[0]
        seen.cluster.delete_pod(gone)
        await wait_for_async(lambda: gone not in seen.members())
        await seen.settled(1, 3)
        seen.cluster.scale_by_hand(DECODE, 5)
        await seen.settled(1, 5)
        seen.cluster.scale_by_hand(DECODE, 2)
        await seen.settled(1, 2)
        seen.cluster.scale_by_hand(DECODE, 0)  # no pod could answer: one is asked for again
        await wait_for_async(lambda: len(seen.members()) < 2)
        await seen.settled(1, 1)

    play(account, scene)


def test_the_api_may_be_away_and_what_was_wished_meanwhile_is_done_then(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        seen.cluster.is_away = True
        before = seen.members()
        await seen.record.wish(lambda state: with_scale(state, {D: 2}, {}))
        (victim,) = before - seen.members()
        await wait_for_async(lambda: seen.kubelet.workers[victim].was_drained)
        lost = sorted(seen.members())[0]
        seen.cluster.delete_pod(lost)  # without notice to any process
        seen.cluster.forget()
        assert victim in seen.cluster.live()
        seen.cluster.is_away = False
        await seen.settled(1, 2)
        assert victim not in seen.cluster.live()

    play(account, scene)


def test_a_pod_that_is_ended_while_another_is_to_leave_does_not_keep_that_one(account: Path) -> None:
    """The ReplicaSet is satisfied then, and would end no pod: the scale goes below, and up again."""

    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        before = seen.members()
        await seen.record.wish(lambda state: with_scale(state, {D: 2}, {}))
        (victim,) = before - seen.members()
        await wait_for_async(lambda: _is_marked(seen, victim))
        other = sorted(seen.members())[0]
        seen.cluster.delete_pod(other)
        await seen.settled(1, 2)
        assert not {victim, other} & set(seen.cluster.live())

    play(account, scene)


def test_a_pod_that_has_not_started_is_nobody_s_worker_yet(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        seen.kubelet.slow = {f"{DECODE}-7d9f-{number:05d}" for number in range(100)}
        await seen.record.wish(lambda state: with_scale(state, {D: 4}, {}))
        await wait_for_async(lambda: len(seen.cluster.live(DECODE)) == 4)
        assert len([name for name in seen.members() if name.startswith(DECODE)]) == 3
        await seen.record.wish(lambda state: with_scale(state, {D: 3}, {}))
        await seen.settled(1, 3)
        assert len(seen.cluster.ended) == 1, "what was asked for and has not come is taken back"

    play(account, scene)


def test_of_two_controllers_one_wins_each_time_and_nobody_is_lost(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        for count in (5, 2, 4, 1):
            await seen.record.wish(partial(with_scale, counts={D: count}, loads={}))
            await seen.settled(1, count)

    found = play(account, scene, controllers=2)
    assert len(found.cluster.ended) == 3 + 3, "as many as were wished to leave"
    # One that has not read the newest record may take a drain back; then preStop drains the pod, as it always does.


def test_controllers_that_die_all_the_while_get_there_too(account: Path) -> None:
    async def scene(seen: Scene) -> None:
        for count in (5, 2, 4, 1):
            await seen.record.wish(partial(with_scale, counts={D: count}, loads={}))
            for patience_s in (0.05, 0.1, 0.2, 0.4, 0.8, 60.0):
                one = await seen.begin()
                settled = asyncio.create_task(seen.settled(1, count))
                await asyncio.wait([settled, one], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                one.cancel()
                settled.cancel()
                await asyncio.gather(one, settled, return_exceptions=True)
            assert seen.is_settled(1, count)

    assert play(account, scene, controllers=0).kubelet.cut_off == []


def test_a_pool_of_an_autoscaler_is_never_scaled_from_here(account: Path) -> None:
    homes = Homes([replace(home, is_scaled_here=home.role is P) for home in HOMES.all])

    async def scene(seen: Scene) -> None:
        await seen.settled(1, 3)
        seen.cluster.scale_by_hand(DECODE, 4)
        await seen.settled(1, 4)
        await seen.record.wish(lambda state: with_scale(state, {D: 1, P: 2}, {}, may_flip=False))
        await seen.settled(2, 4)

    found = play(account, scene, homes=homes)
    assert {name for name, _ in found.cluster.writes if name.startswith("demo-worker-") and "7d9f" not in name} == {
        "demo-worker-prefill"
    }


def _is_marked(seen: Scene, name: str) -> bool:
    pod = seen.cluster.pods.get(name)
    return pod is None or pod["metadata"].get("annotations", {}).get(COST) == LOWEST_COST
