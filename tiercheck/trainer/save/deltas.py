"""Takes deltas in the training thread: records each update's inputs, and checks that they are exact.

Nothing here raises into training. A step that is not exact is skipped. A permanent obstacle ends deltas for
this run, with a reason that the job's status shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import DeclineDeltas
from tiercheck.trainer.backends.backend import Backend, log
from tiercheck.trainer.deltas.delta_format import Delta, Planner
from tiercheck.trainer.deltas.gradients import Event, Recorder, hyper_parameters
from tiercheck.trainer.deltas.probe import ProbeRefused, Probes
from tiercheck.trainer.deltas.watch import Mark, Tree, Watch, trained_parameters
from tiercheck.trainer.replicas.trained_state import TrainedState
from tiercheck.trainer.save.delta import ASKED_AGAIN, Script
from tiercheck.trainer.save.saver import Saver
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.aliasing import is_final
from tiercheck.trainer.state.capture import loose_parameters, named_parameters_of
from tiercheck.trainer.state.frozen import Modes
from tiercheck.trainer.state.optimizer_state import attributes_of_script
from tiercheck.trainer.state.replayable import is_known, why_not_replayable
from tiercheck.trainer.tensors.accelerator import accelerator_of
from tiercheck.trainer.tensors.buffers import Buffers
from tiercheck.trainer.tensors.tensor_parts import NotCapturable

T = TypeVar("T")

_OUTSIDE = "something else than the optimizer changes parameters or optimizer state"
_PATIENCE = 3
"""The number of steps with outside changes, or in a row with a changed model, that ends deltas."""


class ListedModel:
    """A model and its optimizers as they were when listed, which takes too long for every step."""

    def __init__(self, trained: TrainedState) -> None:
        model, optimizers = trained.model, trained.optimizers
        self._optimizers, self._tree = optimizers, Tree(model)
        self._identities = trained_parameters(optimizers)
        self.watch = Watch(model, optimizers, trained.partitions.sent)
        self.buffers = Buffers(model)
        self.modes = Modes(model, loose_parameters(optimizers, model))
        named = [list(named_parameters_of(optimizer, model)) for optimizer in optimizers]
        self.parameters = [parameter for each in named for _, parameter in each]
        names = [[name for name, _ in each] for each in named]
        self.planner = Planner(names, trained.shares.consumers_of(named))
        updated = {*chain.from_iterable(self._identities), *map(id, trained.partitions.sent)}
        self.untracked: dict[str, Tensor] = {
            f"model/{name}": parameter
            for name, parameter in model.named_parameters()
            if id(parameter) not in updated
        }
        """The tensors that no delta has: parameters without an optimizer, and large buffers."""
        self.untracked |= {f"model/{name}": buffer for name, buffer in self.buffers.large()}

    def is_outdated(self) -> bool:
        """Returns whether the model, or what its optimizers train, has changed since."""
        return self._tree.changed() or trained_parameters(self._optimizers) != self._identities


class Deltas:
    """Collects the reports of the optimizers' hooks; `end_step` makes a delta of them."""

    def __init__(self, trained: TrainedState, backend: Backend, saver: Saver) -> None:
        self._trained, self._backend, self._saver = trained, backend, saver
        self._recorder = Recorder(trained.optimizers)
        self._probes = Probes(trained.optimizers)
        self._probing = False
        self._first = 0
        self._doubtful = False
        self._mark: Mark | None = None
        self._outside = ""
        self._outside_count = self._others_in_a_row = 0
        self._given_up = False
        self._too_slow = False
        self._measured = False
        self._late = False
        self._recording = False
        self._missed = False
        self._depth = [0] * len(trained.optimizers)
        self._listed: ListedModel | None = None
        """None: lazy parameters have no shape yet."""
        if is_final(trained.model):
            self._list_model()

    @property
    def active(self) -> bool:
        """Returns whether the job uses deltas and there is no obstacle."""
        return not (self._given_up or self._too_slow) and self._backend.delta is not DeltaMode.NONE

    def started(self, restored: int | None, room: int) -> None:
        """Handles the start of training. `restored`: the version's step, if any.

        `room`: bytes of its largest delta."""
        self._mark = self._list_model().watch.read()
        self._never_raise(self._saver.untracked.begin)
        self._saver.delta_budget.begin_step()
        if restored is not None:
            self._saver.delta_chain.restored(restored)
        self._measured = room > 0
        if self.active:
            for optimizer in self._trained.optimizers:
                if reason := why_not_replayable(optimizer):
                    self.give_up(reason)
                    return

    def before_update(
        self, index: int, step: int, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        self._never_raise(lambda: self._before_update(index, step, arguments, named))

    def after_update(self, index: int) -> None:
        self._never_raise(lambda: self._after_update(index))

    def _before_update(
        self, index: int, step: int, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        listed = self._listed or self._list_model()
        self._depth[index] += 1
        if self._depth[index] > 1:
            return  # a class that calls the step of its base class: the same update
        self._probing = self._probes[index].begins() and self.active and self._backend.delta is DeltaMode.AUTO
        self._recording = self.active and (
            self._probing or not self._measured or not self._accepted or self._saver.delta_chain.reaches(step)
        )
        if not self._recording:
            self._missed = True
            return
        if self._mark is not None and listed.watch.is_changed(self._mark, index):
            self._outside = "before the update"
        given = [value for value in (*arguments[1:], *named.values()) if value is not None]
        self._late = bool(given)
        if not given:
            self._record(index)
        elif not is_known(self._trained.optimizers[index]):
            what = "a closure" if callable(given[0]) else "arguments"
            self.give_up(f"{type(self._trained.optimizers[index]).__name__} was called with {what}")
            self._recording = False
        elif self._probing:
            self._judge(lambda: self._probes[index].before(None))

    def _after_update(self, index: int) -> None:
        if not self._depth[index] or self._listed is None:
            return  # its start was not recorded
        self._depth[index] -= 1
        if self._depth[index] > 0 or not self._recording:
            return
        if self._late:  # the closure made the gradients, and the update used them as they are
            self._recorder.before(index)
        event = self._recorder.open
        self._recorder.after(index)
        if self._probing and event is not None:
            self._judge(lambda: self._probes[index].after(event))
        if self._mark is None:
            self._mark = self._listed.watch.read()
        else:
            self._listed.watch.read_again(self._mark, index)

    def end_step(self, step: int, state: user_state.State, poisoned: bool) -> Delta | None:
        """Returns the delta of the ending step, if one is to be taken. `poisoned`: its loss is not finite."""
        return self._never_raise(lambda: self._end_step(step, state, poisoned))

    def _end_step(self, step: int, state: user_state.State, poisoned: bool) -> Delta | None:
        accepted = self._accepted
        events, inexact = self._recorder.take()
        self._depth = [0] * len(self._depth)  # an update that raised has no end
        self._update_pacing()
        if moved := self._saver.untracked.hopeless:
            self.give_up(f"{moved}, which no optimizer updates, is changed behind torch's counters")
        listed = self._listed
        if not self.active or listed is None:
            return None
        if self._trained.shares.whole:
            self.give_up(self._trained.shares.whole)
            return None
        missed, self._missed = self._missed, False
        mark = listed.watch.read()
        if not missed and self._mark is not None and self._mark != mark:
            self._outside = "after the update"
        self._mark = mark
        outside, self._outside = self._outside, ""
        if listed.is_outdated():
            listed = self._list_model()
            inexact = inexact or "the model, or what its optimizers train, was changed"
            self._mark = listed.watch.read()
            self._others_in_a_row += 1
            if self._others_in_a_row >= _PATIENCE:
                self.give_up("the model, or what its optimizers train, is another one after each step")
                return None
        else:
            self._others_in_a_row = 0
        changed = listed.buffers.changed()
        reaches = not missed and self._saver.delta_chain.reaches(step)
        measure = bool(events) and not self._measured and not reaches
        if outside and accepted:
            self._outside_count += 1
            if self._outside_count >= _PATIENCE:
                self.give_up(f"{_OUTSIDE} ({outside})")
                return None
        if not accepted or not (reaches or measure) or poisoned or inexact or outside:
            self._skip(step, reaches and accepted, poisoned, inexact or f"{_OUTSIDE} ({outside})")
            return None
        try:
            return self._delta(listed, step, events, changed, state, seen=[*self._mark], measure=measure)
        except NotCapturable as error:
            self._skip(step, True, False, str(error))
            return None

    def give_up(self, reason: str, *, doubtful: bool = False) -> None:
        """Ends deltas. The flag means that those already taken must not be used either."""
        if not self._given_up:
            self._given_up = True
            self._doubtful = doubtful and self._first > 0
            self._saver.warn("NoDeltas", f"only snapshots are taken: {reason}")
            self._saver.report(DeclineDeltas(reason, self._first if doubtful else 0))

    def _update_pacing(self) -> None:
        """Pauses deltas while they take too long for the steps, and resumes them when there is time."""
        delta_budget = self._saver.delta_budget
        too_slow = not delta_budget.ends_step(not self._too_slow)
        if too_slow is self._too_slow or self._given_up or self._backend.delta is DeltaMode.NONE:
            return
        self._too_slow = too_slow
        seconds = f"a delta takes {delta_budget.delta:.2g} s, a step {delta_budget.step:.2g} s"
        if delta_budget.asked > ASKED_AGAIN * delta_budget.step:
            seconds += f", and the get_extra_state of modules takes {delta_budget.asked:.2g} s of it"
        if too_slow:
            reason = f"{seconds}, so that training would wait for deltas"
            log.warning("NoDeltas: only snapshots are taken until there is time for deltas: %s", reason)
            self._recorder.forget()
            self._saver.report(DeclineDeltas(reason))
        else:
            log.info("deltas are taken again: %s", seconds)
            self._saver.report(DeclineDeltas())

    def needs_snapshot(self) -> bool:
        """Returns, once, whether a snapshot is due because the deltas since the last one are unusable."""
        needed, self._doubtful = self._doubtful, False
        return needed

    @property
    def _accepted(self) -> bool:
        return self._backend.delta is DeltaMode.REPLAY or self._probes.believed

    def _delta(
        self,
        listed: ListedModel,
        step: int,
        events: list[Event],
        changed: list[tuple[str, Tensor]],
        state: user_state.State,
        *,
        seen: Mark,
        measure: bool,
    ) -> Delta:
        inventories, optimizers = self._trained.inventories, self._trained.optimizers
        modes = listed.modes.facts(inventories.evaluating)
        begun = time.monotonic()
        extra = listed.buffers.extra()
        self._saver.delta_budget.note_extra_state(time.monotonic() - begun)
        facts = {
            "events": [{"groups": event.groups, "scaling": event.scaling} for event in events],
            "groups": [hyper_parameters(optimizer) for optimizer in optimizers],
            "attributes": [attributes_of_script(optimizer) for optimizer in optimizers],
            "extra": extra,
            "cleared": listed.buffers.cleared(),
            **modes,
            **inventories.facts_of_step(),
        }
        blob = user_state.Packed(state, facts, tuple(modes.values()))
        buffers = [(name, buffer.clone()) for name, buffer in changed]
        device = accelerator_of(listed.parameters)
        self._measured = True
        if not measure:
            self._first = self._first or step
        return Delta(
            step=step,
            device=device,
            ready=None if device is None else device.final(),
            events=events,
            buffers=buffers,
            blob=blob,
            threads=torch.get_num_threads(),
            seen=seen,
            only_measure=measure,
        )

    def _record(self, index: int) -> None:
        self._recorder.before(index)
        event = self._recorder.open
        if self._probing and event is not None:
            self._judge(lambda: self._probes[index].before(event))

    def _never_raise(self, work: Callable[[], T]) -> T | None:
        """Runs `work`, and ends deltas on any error, for example a lack of memory, so that updates go on."""
        try:
            return work()
        except Exception as error:  # invariant: no error of TierCheck stops training
            self._recorder.forget()
            self._recording = False
            self.give_up(f"{type(error).__name__}: {error}"[:300])
            return None

    def _judge(self, look: Callable[[], None]) -> None:
        try:
            look()
        except ProbeRefused as refused:
            self.give_up(str(refused), doubtful=True)

    def _skip(self, step: int, due: bool, poisoned: bool, inexact: str) -> None:
        """Skips the delta of a step. `due`: this ends a chain."""
        if not due:
            if self._saver.delta_chain.begun:
                self._saver.skip_delta(step)
        elif poisoned:
            self._saver.skip_delta(step, "NotFinite", "the loss is not finite")
        else:
            self._saver.skip_delta(step, "Inexact", inexact)

    def _list_model(self) -> ListedModel:
        listed = self._listed = ListedModel(self._trained)
        untracked = self._saver.untracked
        self._saver.script = Script(
            self._trained.optimizers,
            listed.planner,
            self._recorder.copy_at_once,
            listed.watch.elsewhere(),
            untracked,
        )
        untracked.watch(listed.untracked)
        return listed
