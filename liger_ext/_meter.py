"""Memory in use and its peak: from the allocator on a GPU, from the resident set of the process on a CPU."""

from __future__ import annotations

import gc
from pathlib import Path

import torch


class Meter:
    """Bytes in use, and the largest number since `reset`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"

    def _status(self, field: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    def reset(self) -> int:
        """Starts a measurement and returns the bytes in use."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        Path("/proc/self/clear_refs").write_text("5")
        return self._status("VmRSS:")

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.cuda else self._status("VmHWM:")
