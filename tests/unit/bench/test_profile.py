"""The profile names our functions that take the time, and the processes that it could not look at."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from bench.load import TimedAnswer
from bench.profile.__main__ import LIMIT, rate_of, shares
from bench.profile.sampling import LIBRARIES, MODEL, own_time, watched

OURS = "StepLoop.turn (/srv/x/workercore/tandem/workercore/step_loop.py:63)"
RAW = f"""<module> (/srv/x/worker/tandem/worker/rank.py:1);{OURS} 7
<module> (/srv/x/worker/tandem/worker/rank.py:1);{OURS};Decoder.forward (/srv/x/engine/tandem/engine/models/decoder.py:102);linear (/usr/lib/torch/nn.py:3) 80
{OURS};sample (/srv/x/engine/tandem/engine/sampler.py:9) 2
{OURS};wait (/usr/lib/python3/threading.py:320) 10
{OURS};get (/srv/x/.venv/lib/site-packages/tandem/else.py:1) 1
"""  # noqa: E501


def test_time_belongs_to_the_innermost_function_but_for_the_models_forward() -> None:
    assert own_time(RAW) == {
        "tandem.workercore.step_loop:StepLoop.turn": 7, MODEL: 80, "tandem.engine.sampler:sample": 2, LIBRARIES: 11,
    }  # fmt: skip


def test_shares_are_of_all_looks_at_all_processes() -> None:
    one, other = own_time(RAW), Counter({LIBRARIES: 100})
    rows = {row.metric: row for row in shares("case", {"rank": one, "router": other})}
    assert rows["busy in rank"].value == rows["busy in router"].value == 50.0
    assert (rows[MODEL].value, rows[LIBRARIES].value) == (40.0, 55.5)
    turn = rows["tandem.workercore.step_loop:StepLoop.turn"]
    assert (turn.value, turn.limit) == (3.5, LIMIT)


def test_tokens_a_second_are_counted_while_all_streams_run() -> None:
    """32 streams with a token every tenth of a second each, twice 6.4 s long."""
    answers = [TimedAnswer(start, [start + step / 10 for step in range(64)]) for start in [0.0] * 32 + [6.4] * 32]
    assert rate_of(answers) == pytest.approx(320.0, rel=0.02)


@pytest.mark.slow
def test_a_process_that_is_gone_is_named_with_the_reason() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(SystemExit, match=r"py-spy cannot look at the router: .+"), watched({"the router": gone.pid}):
        pass
