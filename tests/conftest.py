"""For all tests: one thread for tensors.

The models here are so small that threads only wait for one another: on two busy cores the engine's tests take
six times as long with two threads as with one.
"""

from __future__ import annotations

import torch

torch.set_num_threads(1)
