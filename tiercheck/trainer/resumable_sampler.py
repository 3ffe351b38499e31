"""Orders samples so that none comes twice or is left out, whenever and on any ranks a run resumes.

The order is a function of seed and epoch alone, and the position in it is counted in samples of all ranks
together.

    order = ResumableSampler(len(dataset), global_batch_size=64, seed=0)
    loader = DataLoader(dataset, batch_sampler=order, num_workers=4)
    checkpointer = Checkpointer(model, optimizer, state={"order": order})
    checkpointer.restore()
    while order.epoch < epochs:
        for batch in order.follow(loader):
            ...
            checkpointer.step(loss)

Only batches that the loop has received count, not those that the loader's workers have prefetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import Sampler

from tiercheck.trainer.backends.backend import rank_and_world

_Batch = TypeVar("_Batch")


class ResumableSampler(Sampler[list[int]]):
    """A batch sampler that yields this rank's consecutive part of each global batch.

    `length`: samples of the dataset. `global_batch_size`: samples that all ranks together take at once (one
    micro-batch); it does not depend on their number, so neither do the global batches. Parts differ by at
    most one sample if it is not divisible. `tail`: what becomes of an epoch's last samples if they do not
    fill a global batch: "drop" leaves them out of this epoch (each epoch has another order); "carry" fills
    the batch from the next epoch, so that every sample comes exactly once in each. `rank`, `world_size`:
    default to those of torch.distributed or torchrun's environment.

    It needs 8 bytes of memory per sample for the order of an epoch. Raises ValueError if no global batch can
    be filled, or if there are more ranks than samples in one.
    """

    def __init__(
        self,
        length: int,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        tail: Literal["drop", "carry"] = "drop",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        own = rank_and_world()
        self.rank = own[0] if rank is None else rank
        self.world_size = own[1] if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is none of {self.world_size} ranks")
        if not self.world_size <= global_batch_size <= length:
            raise ValueError(
                f"a global batch of {global_batch_size} must have a sample for each of {self.world_size} "
                f"ranks and no more than the {length} there are"
            )
        self._length, self._global, self._seed = length, global_batch_size, seed
        self._shuffle, self._carry = shuffle, tail == "carry"
        self.epoch = 0
        """The epoch of the next global batch."""
        self.position = 0
        """The number of samples of this epoch that all ranks together have been given."""
        self._kept: tuple[int, torch.Tensor] | None = None
        self._loads = 0
        """The number of times that a position was loaded."""

    def __len__(self) -> int:
        """Returns the number of global batches in this whole epoch, also in one that is resumed."""
        samples = self._length - self.position % self._global
        return -(-samples // self._global) if self._carry else samples // self._global

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches from the position to the epoch's end. Only `advance` moves the position.

        Raises RuntimeError once a position is loaded: the batches would go on from the one before.
        """
        epoch, position, loads = self.epoch, self.position, self._loads
        while epoch == self._epoch_at(position, epoch):
            self._refuse_stale(loads)
            yield self._part(epoch, position)
            position += self._global

    def _refuse_stale(self, loads: int) -> None:
        if loads != self._loads:
            raise RuntimeError(
                "a position was put back since this iteration began: begin it anew after each restore, or "
                "loop over checkpointer.batches(loader, total)"
            )

    def _epoch_at(self, position: int, epoch: int) -> int:
        """Returns the epoch in which the global batch at `position` of `epoch` begins."""
        end = position if self._carry else position + self._global - 1
        return epoch if end < self._length else epoch + 1

    def follow(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yields the loader's batches, and counts each when it is handed out.

        So a checkpoint taken in the loop's body includes its batch. One taken at an epoch's last batch is
        still in that epoch: a run that resumes there gets no batch, and continues with what the script does
        at the epoch's end.
        """
        drawn = torch.get_rng_state()
        # Draws a seed for its workers, and would do so once more in an epoch that is resumed.
        batches = iter(loader)
        torch.set_rng_state(drawn)
        loads = self._loads
        try:
            for batch in batches:
                self._refuse_stale(loads)
                self.position += self._global
                yield batch
        finally:  # also if the loop is left at the last batch
            if loads == self._loads:
                self._end_epoch()

    def advance(self, batches: int = 1) -> None:
        """Counts global batches that were handed out by other means than `follow`."""
        for _ in range(batches):
            self.position += self._global
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self._epoch_at(self.position, self.epoch) != self.epoch:
            self.position = self.position - self._length if self._carry else 0
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": [self._length, self._seed, self._shuffle, self._carry],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a position. Raises ValueError if it is one in another order."""
        order = [self._length, self._seed, self._shuffle, self._carry]
        if state["order"] != order:
            raise ValueError(
                "the position is one in another order of samples: (length, seed, shuffle, carry) were "
                f"{state['order']}, here they are {order}"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._loads += 1

    def _part(self, epoch: int, position: int) -> list[int]:
        begin, end = (position + self._global * n // self.world_size for n in (self.rank, self.rank + 1))
        part = self._order(epoch)[begin:end].tolist()
        if (missing := end - begin - len(part)) > 0:
            # The rest of a batch that ends in the next epoch, which has at least as many samples as a batch.
            first = max(0, begin - self._length)
            part += self._order(epoch + 1)[first : first + missing].tolist()
        return [int(index) for index in part]

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._length, device="cpu")
        if self._kept is None or self._kept[0] != epoch:
            mixed = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(mixed[:8], "little", signed=True))
            self._kept = epoch, torch.randperm(self._length, generator=generator, device="cpu")
        return self._kept[1]
