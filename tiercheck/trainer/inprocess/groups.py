"""Gives living process groups new connections, and lets a script build its model without any.

A ProcessGroup object lives as long as its process: DeviceMesh, DTensor, FSDP2, DDP's reducer, compiled code
and the script's own variables hold it. Only the Backend below it is replaced, through
`ProcessGroup._register_backend` (torch 2.6 to 2.13). gloo's `abort` does not wake a thread that waits in a
collective; the end of its connections does, also of one to a peer that is stopped
(docs/design/033-in-process-recovery.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

from tiercheck.protocol.names import ENV_JOINS, ENV_RUN_DIR
from tiercheck.supervised import begin

dist: Any = torch.distributed
c10d: Any = getattr(dist, "distributed_c10d", None)
"""The module with the private parts that are used; None: torch was built without it."""

_RELEASE = "_ZN4c10d12ProcessGroup17release_resourcesEv"
"""The symbol that empties a ProcessGroup of backends; torch calls it at its end, but not from Python."""
_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
_NO_MEMBER = getattr(getattr(c10d, "GroupMember", None), "NON_GROUP_MEMBER", None)
_LOOK_EVERY = 0.02
_JOIN_SECONDS = 600.0
"""Seconds. Limits the wait for others when connections are made anew: one may build its model."""
_CLOSE_SECONDS = 1.0
_HARMLESS = {"init_process_group", "new_group", "barrier", "monitored_barrier", "destroy_process_group"}
"""The functions of torch.distributed that move no values of the script."""


class NotAlone(RuntimeError):
    """The script exchanges values with other ranks before `restore`, and these are not there."""


class Interrupted(RuntimeError):
    """The connections were closed while they were made anew."""


@dataclass
class _Made:
    """One call that made a group: its arguments, and the group, None where this rank is no member."""

    arguments: dict[str, Any]
    backend: str
    group: Any


class ReconnectableGroups:
    """Records how each process group of this process is made. `disconnect` may be called by any thread.

    A process that joins others that are still there (`ENV_JOINS`) is alone until `reconnect`: collectives
    return at once and reach no rank, so that it may run its script up to `restore` without the others.
    """

    def __init__(self) -> None:
        self.exchanged = ""
        """The place where the script exchanged values with other ranks before `restore`; empty: none."""
        self._made: list[_Made] = []
        self._before_function = (0, 0)
        """The numbers of groups, and of c10d's next one, before a function that may be entered again."""
        self._known: dict[str, _Made] = {}
        """The groups of such a function that it has not yet requested again, by name."""
        self._sockets: set[tuple[int, str]] = set()
        self._closed = False
        self._in_setup = c10d is not None and ENV_RUN_DIR in os.environ
        if self._in_setup:
            self._make, self._rendezvous = c10d._new_process_group_helper, c10d.rendezvous
            self._signature, self._is_outside = inspect.signature(self._make), c10d._rank_not_in_group
            c10d._new_process_group_helper, c10d.rendezvous = self._make_recorded, self._meet
            c10d._rank_not_in_group = self._notice_exchange

    @property
    def is_detached(self) -> bool:
        """Returns whether the other ranks are there already, and this one is still to join them."""
        return os.environ.get(ENV_JOINS) == "1"

    def end_of_setup(self) -> None:
        """Ends the setup, when the script calls `restore`: later exchanges of values are of its steps."""
        if self._in_setup:
            c10d._rank_not_in_group, self._in_setup = self._is_outside, False
            self._known.clear()

    def enter_function(self) -> None:
        """Records the groups that exist before a function that may be called again and remake its own."""
        if c10d is not None:
            self._before_function = len(self._made), c10d._world.group_count

    def detach(self) -> None:
        """Leaves the other ranks: until `reconnect` the script is in its setup, as in a process that joins.

        A function that is entered again gets the groups that it made before.
        """
        os.environ[ENV_JOINS] = "1"
        if not self._made:
            return
        self._renew(_no_store(), c10d.Backend("fake"))
        first, c10d._world.group_count = self._before_function
        self._known = {made.arguments["group_name"]: made for made in self._made[first:]}
        c10d._rank_not_in_group, self._in_setup = self._notice_exchange, True
        if not first:  # the function makes the default group, too
            _init_only_once()
            c10d._world.group_count += 1

    def refusal(self) -> str:
        """Returns why connections cannot be made anew; empty if they can."""
        if not dist.is_initialized():
            ended = "the process group was destroyed: destroy it after the last step only"
            return ended if self._made else ""
        ours = {id(made.group) for made in self._made}
        if others := [name for group, name in c10d._world.pg_names.items() if id(group) not in ours]:
            when = "before `import tiercheck`, after restore(), or by split_group"
            return f"process group {others[0]!r} was made {when}: make it by new_group in between"
        kinds = {type(each).__name__ for made in self._made if made.group for each in _backends(made.group)}
        if kinds - {"ProcessGroupGloo", "FakeProcessGroup"}:  # one that was alone keeps that of other devices
            return f"connections of {', '.join(sorted(kinds))} cannot be made anew yet, only those of gloo"
        if self.exchanged:
            return f"the script exchanges values before restore(), in {self.exchanged}: do it afterwards"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            why = "torchrun has options with which TierCheck does not start the ranks itself"
            return f"{why}: it does with --nproc-per-node and -m alone"
        return "" if _release() else "this torch cannot give a process group another backend"

    def disconnect(self) -> None:
        """Closes the connections of all groups: a collective that waits, here or at a peer, gets an error."""
        self._closed = True
        for descriptor, inode in self._sockets & _open_sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if inode and connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)

    def reopen(self) -> None:
        """Allows `reconnect`; another `disconnect` interrupts it."""
        self._closed, self._sockets = False, set()

    def reconnect(self, host: str, port: int, rank: int, world_size: int) -> None:
        """Gives each group new connections, in the order in which groups were made. A collective call.

        The ranks meet at rank 0's store. Raises Interrupted, RuntimeError, DistBackendError.
        """
        os.environ.pop(ENV_JOINS, None)
        if not self._made:
            return
        if rank:
            self._wait_until_listening(host, port)
        with self._noting_sockets():
            store = dist.TCPStore(
                host, port, world_size, rank == 0,
                timeout=timedelta(seconds=_JOIN_SECONDS), wait_for_workers=False,
            )  # fmt: skip
        self._renew(store)
        store.set_timeout(self._made[0].arguments["timeout"])
        self._refuse_closed()

    def _renew(self, store: Any, backend: str | None = None) -> None:
        """Puts new backends below all groups, of their own kinds if no other is given."""
        there = c10d._world.pg_names
        self._made = [made for made in self._made if made.group is None or made.group in there]
        with _tables_set_aside() as (default, kept):
            made_anew = [
                (made, self._make_again(made, store, backend or made.backend)) for made in self._made
            ]
            renewed = [(made.group, new) for made, new in made_anew if made.group is not None]
            old = [_put_below(group, new) for group, new in renewed]
            # gloo waits for the collectives of the old ones: now and then one never ends.
            begin("tiercheck-connections", old.clear).join(_CLOSE_SECONDS)
            _hand_over(renewed, kept)
        c10d._unregister_all_process_groups()
        for group, _ in renewed:
            c10d._register_process_group(c10d._world.pg_names[group], group)
        c10d._update_default_pg(default)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Interrupted("a newer attempt has begun")

    def _wait_until_listening(self, host: str, port: int) -> None:
        """Polls the store until it listens, because its own wait cannot be interrupted."""
        end = time.monotonic() + _JOIN_SECONDS
        while True:
            self._refuse_closed()
            try:
                socket.create_connection((host, port), timeout=5.0).close()
                return
            except OSError:
                if time.monotonic() > end:
                    raise
            time.sleep(_LOOK_EVERY)

    def _make_again(self, made: _Made, store: Any, backend: str) -> Any:
        self._refuse_closed()
        arguments, world = dict(made.arguments), c10d._world
        default = not arguments["global_ranks_in_group"]
        arguments["backend"] = backend
        arguments["store"] = (
            dist.PrefixStore("default_pg", store) if default else world.pg_map[c10d._get_default_group()][1]
        )
        with self._noting_sockets():
            new = self._make(**arguments)[0]
        if default:
            c10d._update_default_pg(new)
            world.pg_group_ranks[new] = {rank: rank for rank in range(new.size())}
        return new

    @contextlib.contextmanager
    def _noting_sockets(self) -> Iterator[None]:
        before = _open_sockets()
        yield
        self._sockets |= _open_sockets() - before

    def _make_recorded(self, *values: Any, **named: Any) -> Any:
        if not self._in_setup:  # a replacement, which meets the others in `restore`, will not have it
            return self._make(*values, **named)
        bound = self._signature.bind(*values, **named)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        backend = str(arguments["backend"])
        del arguments["store"]
        known = self._known.pop(arguments["group_name"], None)
        if (
            known is not None
            and known.arguments["global_ranks_in_group"] == arguments["global_ranks_in_group"]
        ):
            member = known.group is not None
            return (known.group, c10d._world.pg_map[known.group][1]) if member else (_NO_MEMBER, None)
        if self.is_detached:
            if backend == "fake" and self._made:
                backend = self._made[0].backend
            bound.arguments["backend"] = c10d.Backend("fake")
        with self._noting_sockets():
            made = self._make(*bound.args, **bound.kwargs)
        member = isinstance(made[0], dist.ProcessGroup)
        self._made.append(_Made(arguments, backend, made[0] if member else None))
        return made

    def _meet(self, *values: Any, **named: Any) -> Any:
        if not self.is_detached:
            return self._rendezvous(*values, **named)
        found = _no_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return iter([found])

    def _notice_exchange(self, group: Any) -> Any:
        """Records an exchange of values; torch.distributed's functions call it. Raises NotAlone if alone."""
        if not self.exchanged and (place := _called_by_script()):
            self.exchanged = place
            if self.is_detached:
                raise NotAlone(f"the script exchanges values with other ranks before restore(), in {place}")
        return self._is_outside(group)


@functools.cache
def groups() -> ReconnectableGroups:
    return ReconnectableGroups()


def _called_by_script() -> str:
    """Returns where the script called a function that moves values; empty: torch itself did, or none."""
    frame, called = sys._getframe(2), ""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed."):
        if frame.f_globals["__name__"] not in (c10d.__name__, "torch.distributed.c10d_logger"):
            return ""
        if frame.f_globals["__name__"] == c10d.__name__:
            called = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or called in _HARMLESS or called.startswith(("get_", "is_", "_")):
        return ""
    if frame.f_globals.get("__name__", "").startswith(("torch.", "tiercheck.")):
        return ""
    return f"{called} at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def _init_only_once() -> None:
    """Makes `init_process_group` leave a default group as it is, wherever a script has imported it to."""
    known: Callable[..., None] = c10d.init_process_group

    @functools.wraps(known)
    def init_process_group(*values: Any, **named: Any) -> None:
        if not dist.is_initialized():
            known(*values, **named)

    module: Any
    for module in list(sys.modules.values()):
        if (names := getattr(module, "__dict__", {})).get("init_process_group") is known:
            names["init_process_group"] = init_process_group


def _no_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

    return FakeStore()


@functools.cache
def _release() -> Any:
    """Returns the C++ function of that name, for the address of a group; None: this torch has none."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        found = library[_RELEASE]
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p], None
    return found if hasattr(dist.ProcessGroup, "_id") else None


def _put_below(group: Any, new: Any) -> list[Any]:
    """Gives `group` the backends of `new`. Returns the old ones: without references their threads end."""
    kinds, old = c10d.Backend.backend_type_map, _backends(group)
    found = {device: each._get_backend(device) for each in (group, new) for device in each._device_types}
    _release()(group._id())
    for device, backend in found.items():  # one that was alone keeps that of other devices
        group._register_backend(device, kinds[backend.name()], backend)
    kind = kinds.get(new._get_backend_name(), dist.ProcessGroup.BackendType.CUSTOM)
    group._set_default_backend(kind)
    return old


def _backends(group: Any) -> list[Any]:
    return list({id(each): each for each in map(group._get_backend, group._device_types)}.values())


def _open_sockets() -> set[tuple[int, str]]:
    """Returns descriptor and inode of each socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found.add((int(name), link))
    return found


_Tables = dict[str, dict[Any, Any]]


@contextlib.contextmanager
def _tables_set_aside() -> Iterator[tuple[Any, _Tables]]:
    """Empties c10d's tables of groups meanwhile; yields the default group and what was in them.

    If the block raises, they are as they were.
    """
    world = c10d._world
    default, count = c10d._get_default_group(), world.group_count
    kept: _Tables = {name: dict(getattr(world, name)) for name in _TABLES}
    tags = {tag: list(found) for tag, found in world.tags_to_pg.items()}
    for name in _TABLES:
        getattr(world, name).clear()
    world.tags_to_pg.clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    try:
        yield default, kept
    except BaseException:
        for name in _TABLES:
            getattr(world, name).clear()
            getattr(world, name).update(kept[name])
        raise
    finally:
        world.tags_to_pg.clear()
        world.tags_to_pg.update(tags)
        c10d._update_default_pg(default)
        world.group_count = count


def _hand_over(renewed: list[tuple[Any, Any]], kept: _Tables) -> None:
    """Enters the old groups in c10d's tables, with what is new about the connections below."""
    world = c10d._world
    for group, new in renewed:
        entry = world.pg_map[new]
        config = world.pg_backend_config.get(new)
        for name in _TABLES:
            getattr(world, name).pop(new, None)
            if group in kept[name]:
                getattr(world, name)[group] = kept[name][group]
        world.pg_map[group] = entry
        if config is not None:
            world.pg_backend_config[group] = config
