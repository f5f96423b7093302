"""A slice of `make proof NAME=elastic`: random commands against a real cluster under load."""

from proof.elastic.__main__ import play_round


def test_random_commands_under_load_disturb_nobody() -> None:
    done = play_round(seed=11, number=0, commands=3, flip_s=60.0)  # how long one takes is the long run's to judge
    assert len(done) == 3
