"""Workers, router and the volatile store die, one event in a hundred is lost, the last ones too; the index recovers."""

from pathlib import Path

import pytest

from tests.chaos.index_scene import TROUBLES, index_scene


def test_the_index_survives_everything(tmp_path: Path) -> None:
    with index_scene(tmp_path, seed=4) as scene:
        for kind in TROUBLES:
            with scene.load():
                print(scene.trouble(kind))
            calm = scene.calm(probes=10)
            print(f"{kind}: {calm}")
            assert calm.stale == 0
            assert calm.hits > 0
        assert scene.answered > 100
        assert scene.prompts.wrong == []


@pytest.mark.drawn(1)
@pytest.mark.parametrize("is_router_new", [False, True], ids=["router that knows better", "new router"])
def test_nobody_comes_back_from_the_dead(tmp_path: Path, is_router_new: bool) -> None:
    with index_scene(tmp_path, seed=5) as scene:
        print(scene.haunt(is_router_new=is_router_new))
        calm = scene.calm(probes=10)
        print(calm)
        assert calm.stale == 0
        assert scene.prompts.wrong == []
