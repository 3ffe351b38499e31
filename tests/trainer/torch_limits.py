"""What the torch that the tests run on cannot do itself, whatever we do."""

import pytest
import torch
from torch.torch_version import TorchVersion

FSDP2_ON_CPUS = hasattr(torch.cpu.Stream, "record_event")
"""torch 2.6 has FSDP2 for accelerators alone."""
needs_fsdp2_on_cpus = pytest.mark.skipif(not FSDP2_ON_CPUS, reason="FSDP2 of this torch needs an accelerator")
FSDP2_WITH_TENSOR_PARALLEL = torch.__version__ >= TorchVersion("2.9")
"""In torch 2.8 `full_tensor`, by which tests compare, is wrong where both cut a dimension unevenly, and a
stage of a pipeline refuses such outputs. TierCheck's own boxes of the shards are right there."""


def shards_by_fsdp2(kind: str) -> bool:
    """Whether this way to be parallel, as tests name them, is FSDP2, alone or with others."""
    return "fsdp" in kind or kind == "hybrid"
