"""An answer that a JSON Schema constrains, offline.

python examples/structured_output.py
"""

from __future__ import annotations

import json

from phonograph import LLM, SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["apples", "cards"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "number"],
}


def main() -> None:
    llm = LLM("demo", max_num_seqs=1, cudagraph_capture_sizes=[1, 32, 64])
    constraint = StructuredOutputs(json=SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=constraint)
    (output,) = llm.chat([{"role": "user", "content": "Tom has 12 apples. What does Tom have?"}], params)
    print(json.loads(output.outputs[0].text))


if __name__ == "__main__":
    main()
