# Names of transformers for pyright, which else reads all of its models: 30 seconds.
from typing import Any

from torch import nn

class PreTrainedModel(nn.Module):
    config: Any
    def __getattr__(self, name: str) -> Any: ...

def __getattr__(name: str) -> Any: ...
