"""Cost of a step of 256 running decodes on the host.

The bounds leave room for a slow, shared core; the figures are
printed (`pytest -s`) because they, not the bounds, are what to watch."""

from __future__ import annotations

import statistics
import time

import pytest
from scheduling import full_group

from phonograph.core.batch import StepOutput
from phonograph.core.limits import Limits
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.scheduling.scheduler import Scheduler

NUM_SEQS = 256


@pytest.mark.parametrize("together", [False, True], ids=["borders spread", "borders together"])
def test_cost_of_256_decodes(together: bool) -> None:
    limits = Limits(max_num_seqs=NUM_SEQS, max_num_batched_tokens=8192, max_model_len=4096)
    scheduler = Scheduler(limits, groups=[full_group(16)], num_blocks=16384)
    for number in range(NUM_SEQS):
        prompt = [number] * (100 if together else 100 + number % 16)
        params = SamplingParams(max_tokens=None)
        request = Request(
            request_id=str(number), prompt_token_ids=prompt, params=params, arrival=number, eos_token_ids=(1,)
        )
        scheduler.add(request)
    schedule_ms: list[float] = []
    update_ms: list[float] = []
    while len(schedule_ms) < 160:
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        slots = [slot for slot, samples in zip(batch.slots, batch.samples, strict=True) if samples]
        output = StepOutput(slots=slots, token_ids=[[1000 + slot] for slot in slots])
        ran = time.perf_counter()
        assert len(scheduler.update(batch, output)) == len(slots)
        if batch.num_decodes == NUM_SEQS:
            schedule_ms.append((scheduled - start) * 1e3)
            update_ms.append((time.perf_counter() - ran) * 1e3)
    for name, times in (("schedule", schedule_ms), ("update", update_ms)):
        mean, median, worst = statistics.mean(times), statistics.median(times), max(times)
        print(f"{name} of {NUM_SEQS} decodes: mean {mean:.3f}, median {median:.3f}, worst {worst:.3f} ms")
    assert statistics.median(schedule_ms) < 1.0
    assert statistics.median(update_ms) < 0.75
