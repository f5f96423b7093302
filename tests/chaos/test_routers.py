"""One of three routers dies: the others know all that it knew, and nothing of its requests stays behind."""

import random

from tests.chaos.router_scene import ROUTERS, router_scene


def test_any_router_of_three_may_die() -> None:
    with router_scene() as scene:
        assert scene.hit_rate(scene.routers, requests=60, questions=1) > 0
        left = [scene.kill_router(number, random.Random(number)) for number in range(ROUTERS)]
        print(left)
        assert sum(one.hits for one in left) > 0
        assert scene.hit_rate(scene.routers, requests=60, questions=2) > 0.3
        assert scene.prompts.wrong == []
