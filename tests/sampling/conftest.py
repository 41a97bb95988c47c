"""One thread: the tensors are small, and CI runs several workers on two cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
