"""Calls that programs for vLLM make: queued prompts, log-probabilities, beam search and metrics.

python examples/vllm_calls.py
"""

from __future__ import annotations

from phonograph import LLM, BeamSearchParams, EngineArgs, SamplingParams


def main() -> None:
    args = EngineArgs(model="demo", max_num_seqs=4, cudagraph_capture_sizes=[1, 2, 4, 32], dtype="auto")
    with LLM.from_engine_args(args) as llm:
        tokenizer = llm.get_tokenizer()
        prompt = tokenizer.encode("Tom has 12 apples and buys 7 more.")
        llm.enqueue([prompt, "1 2 3"], SamplingParams(temperature=0, max_tokens=8, logprobs=1))
        for output in llm.wait_for_completion():
            sample, times = output.outputs[0], output.metrics
            assert sample.logprobs is not None and times is not None
            for token_id, position in zip(sample.token_ids, sample.logprobs, strict=True):
                best = position[token_id]
                print(f"{best.decoded_token!r:12} {best.logprob:8.4f}, rank {best.rank}")
            print(
                f"{times.num_generation_tokens} tokens, log-probability {sample.cumulative_logprob:.3f}; queued at "
                f"{times.arrival_time:.0f}, first token after {times.first_token_latency:.3f} s, "
                f"the rest in {times.last_token_ts - times.first_token_ts:.3f} s"
            )
        (found,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=8))
        for sequence in found.sequences:
            print(f"{sequence.cum_logprob:8.4f} {sequence.finish_reason}: {sequence.text}")
        for metric in llm.get_metrics():
            print(metric.name, dict(metric.labels), metric.value)


if __name__ == "__main__":
    main()
