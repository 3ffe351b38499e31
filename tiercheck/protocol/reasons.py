"""Why a training command or one of its ranks ended: the words that launcher, rank and sidecar say and the controller judges."""

from __future__ import annotations

# Of a rank (`RankFailure.reason`).
OUT_OF_GPU_MEMORY = "OutOfGPUMemory"
COLLECTIVE_FAILED = "CollectiveFailed"
"""Usually the echo of what happened to another rank."""
GPU_FAULT = "GPUFault"
"""The driver says that the hardware failed."""
UNCAUGHT = "UncaughtException"
EXITED = "Exited"
"""sys.exit with another code than 0."""
VANISHED = "Vanished"
"""Said by its sidecar: the rank said nothing."""

# Of the command (`TrainerReport.reason`).
CRASHED = "Crashed"
SIGNALLED = "Signalled"
OOM_KILLED = "OOMKilled"
CONTAINER_RESTARTED = "ContainerRestarted"
TORCH_MISSING = "TorchMissing"
CANNOT_START = "CannotStart"
