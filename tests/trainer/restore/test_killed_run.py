"""Promise: a sharded run that is killed continues bit for bit, to the same parameters."""

from __future__ import annotations

from pathlib import Path

from tests.lives import Lives, Said
from tests.trainer.torch_limits import needs_fsdp2_on_cpus

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"
STEPS, EVERY = 40, 4
SMALL = f"--steps {STEPS} --layers 1 --width 32 --batch 2 --context 16 --every {EVERY}".split()


def run(lives: Lives, folder: Path, kill_at: int | None = None) -> Said:
    """What rank 0 of two said."""
    words = [EXAMPLE, *SMALL, "--folder", folder]
    said, _ = lives.run(["torch.distributed.fsdp", "tiercheck"], words, ranks=2, kill_at=kill_at)
    return said


@needs_fsdp2_on_cpus
def test_killed_sharded_run_ends_with_the_same_losses_and_parameters(lives: Lives, tmp_path: Path) -> None:
    whole = run(lives, tmp_path / "whole")
    run(lives, tmp_path / "cut", kill_at=10)
    resumed = run(lives, tmp_path / "cut")
    first = resumed[0]["step"]
    assert (
        first % EVERY == 1 < first < STEPS
    )  # after the newest version of which every rank's copy was complete
    losses = {line["step"]: line["loss_hex"] for line in whole if "step" in line}
    assert list(losses) == list(range(1, STEPS + 1))
    assert {line["step"]: line["loss_hex"] for line in resumed if "step" in line} == {
        step: loss for step, loss in losses.items() if step >= first
    }
    assert resumed[-1]["digest"] == whole[-1]["digest"]
