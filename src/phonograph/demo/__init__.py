"""The model that ships in the package: really trained, tiny, and graded on tasks generated from a seed.

It lets every command run without a download, and it gives modes and backends real text to agree on.
"""

from pathlib import Path
from typing import Final

MODEL_DIRECTORY: Final = Path(__file__).parent / "model"
"""The model that `--model demo` means, in the Hugging Face layout."""
HEAD_DIRECTORY: Final = Path(__file__).parent / "eagle3"
"""The EAGLE-3 head of that model, which "demo-eagle3" means as the `model` of a `speculative_config`."""
