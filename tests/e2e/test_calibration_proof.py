"""A slice of `make proof NAME=calibration`: two short runs of sim engines, and the simulator beside them. No timing is
held to anything here: other tests run on the same cores."""

import dataclasses

import pytest

from proof.calibration import closing, real
from proof.calibration.engines import ENGINES, EngineKind
from proof.calibration.runs import JUDGED, LEAD, MEDIUM, Run, Way, trace
from tandem.controlplane.simulator import calibration
from tandem.core.config import SimSection

FAST = SimSection(prefill_tokens_per_s=8000.0, decode_step_s=0.004, decode_sequence_s=0.0002)


@pytest.mark.parametrize("way", [Way.ALWAYS, Way.MIXED])
def test_a_run_is_played_to_both_sides(way: Way) -> None:
    sim = ENGINES[EngineKind.SIM]
    engine = dataclasses.replace(sim, worker=dataclasses.replace(sim.worker, sim=FAST))
    base = calibration.from_record(engine.measured())
    run = Run(way=way, lengths=MEDIUM, load=0.2, is_calibrating=True)
    requests = trace(run, base, seconds=2.0, seed=1)
    found = real.play(engine, run, requests)

    assert found["requests"] == len(requests.requests) - LEAD
    workers = found["workers"]
    prompts = sum(one.prompt_tokens for one in requests.requests)
    answers = sum(one.output_tokens - 1 for one in requests.requests)
    assert sum(worker["prefill_tokens"] for worker in workers.values()) >= prompts, "nothing was cached"
    assert sum(worker["decode_tokens"] for worker in workers.values()) >= answers
    assert len(workers) == 2
    if way is Way.ALWAYS:
        (prefill,) = (worker for worker in workers.values() if worker["prefill_tokens"] >= prompts)
        (decode,) = (worker for worker in workers.values() if worker["decode_tokens"] >= answers)
        assert prefill is not decode
        assert prefill["decode_tokens"] == 0

    knobs, miss = closing.closest(base, [(run, requests, found["figures"])])
    said = closing.play(run, requests, knobs.of(base))
    assert set(said) == set(found["figures"]) > set(JUDGED)
    assert all(value > 0 for value in (*said.values(), *found["figures"].values()))
    assert miss >= 0
