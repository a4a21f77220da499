"""The private names of torch and Python that the agent uses, and the versions tried.

    torchrun loads the handler ─► require ─► a name is missing: the backend refuses, and names it
    --rdzv-conf=warm=yes ─► missing(WARM) ─► not empty: one line; workers are started cold

Two classes derive from private classes of torch and use names of these classes as their own:
`reft.elastic.rounds.Executor` and `reft.elastic.stores.tcp.TcpBackend`. The executor overrides four
actions of torch's executor. It stays beside the rules that it carries out; its names stand here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pkgutil import resolve_name
from typing import Any, TypeAlias

import torch
from torch.distributed import Store
from torch.distributed.elastic.rendezvous import dynamic_rendezvous, utils
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousBackend

from reft.errors import ConfigError
from reft.private_names import PrivateName, has_name, refusal

TRIED = ("2.13",)
TRIED_PYTHON = ("3.11",)
RENDEZVOUS = "torch.distributed.elastic.rendezvous."
MULTIPROCESSING = "torch.distributed.elastic.multiprocessing."
BACKEND = "--rdzv-backend=reft"

# "module" or "module:Class" → names of the module, or of the class and its objects.
Table = Mapping[str, tuple[PrivateName, ...]]


def _table(use: str, tried: tuple[str, ...], names: Mapping[str, str]) -> Table:
    return {
        path: tuple(PrivateName(re.split("[.:]", path)[-1], name, use, tried) for name in text.split())
        for path, text in names.items()
    }


REQUIRED = _table(
    BACKEND,
    TRIED,
    {
        RENDEZVOUS + "dynamic_rendezvous": "_Action _DistributedRendezvousOpExecutor _NodeDesc "
        "_remove_participant_epilogue _RendezvousContext _RendezvousState _RendezvousStateHolder _should_keep_alive",
        RENDEZVOUS + "dynamic_rendezvous:DynamicRendezvousHandler": "_this_node _state_holder _op_executor _record "
        "_store _stop_heartbeats",
        RENDEZVOUS + "dynamic_rendezvous:_BackendRendezvousStateHolder": "_backend",
        RENDEZVOUS
        + "dynamic_rendezvous:_DistributedRendezvousOpExecutor": "_node _state _settings _record _keep_alive "
        "_add_to_participants _remove_from_participants _mark_rendezvous_closed _mark_rendezvous_complete",
        RENDEZVOUS + "utils": "_matches_machine_hostname",
    },
)
# torch keeps the workers' store and its address over all rounds; see handler.py.
CACHES = _table(
    "reft can't give restarted workers a new store, and they may read what the round before wrote",
    TRIED,
    {RENDEZVOUS + "dynamic_rendezvous:DynamicRendezvousHandler": "_bootstrap_store_info _shared_tcp_store_server"},
)
WARM = {
    **_table(
        "warm=yes",
        TRIED,
        {
            MULTIPROCESSING + "api": "get_subprocess_handler",
            MULTIPROCESSING + "subprocess_handler:SubprocessHandler": "_popen",
            "torch.cuda": "_is_in_bad_fork",
        },
    ),
    **_table(
        "warm=yes",
        TRIED_PYTHON,
        {"subprocess:Popen": "_execute_child _child_created", "runpy": "_run_module_as_main"},
    ),
}
# Only objects have these names.
OUTPUTS = _table("warm=yes", TRIED, {MULTIPROCESSING + "subprocess_handler:SubprocessHandler": "_stdout _stderr"})


def missing(table: Table, find: Callable[[str], Any] = resolve_name) -> list[PrivateName]:
    """Returns the names of a table that this torch or Python lacks.

    Args:
        table: the names.
        find: returns the module or class of a path; raises ImportError or AttributeError if there
            is none.
    """
    absent: list[PrivateName] = []
    for path, names in table.items():
        try:
            holder = find(path)
        except (ImportError, AttributeError):
            absent += names
        else:
            absent += (name for name in names if not has_name(holder, name.name))
    return absent


def missing_in(table: Table, holder: object) -> list[PrivateName]:
    """Returns the names of a table that an object lacks."""
    return [name for names in table.values() for name in names if not has_name(holder, name.name)]


def require(absent: Iterable[PrivateName], torch_version: str = str(torch.__version__)) -> None:
    """Refuses a torch that lacks a name.

    Args:
        absent: the missing names.
        torch_version: for the message.

    Raises:
        ConfigError: names the first missing name.
    """
    for name in absent:
        raise ConfigError(*refusal(name, torch_version))


require(missing(REQUIRED))  # torchrun loads this module once, with the handler

Action: TypeAlias = dynamic_rendezvous._Action
NodeDesc: TypeAlias = dynamic_rendezvous._NodeDesc
OpExecutor: TypeAlias = dynamic_rendezvous._DistributedRendezvousOpExecutor
RendezvousContext: TypeAlias = dynamic_rendezvous._RendezvousContext
RendezvousState: TypeAlias = dynamic_rendezvous._RendezvousState
RendezvousStateHolder: TypeAlias = dynamic_rendezvous._RendezvousStateHolder
is_beat_due = dynamic_rendezvous._should_keep_alive
finish_removal = dynamic_rendezvous._remove_participant_epilogue
is_own_hostname = utils._matches_machine_hostname


def this_node(handler: DynamicRendezvousHandler) -> NodeDesc:
    """Returns this agent as torch's handler describes it."""
    return handler._this_node


def backend_of(handler: DynamicRendezvousHandler) -> RendezvousBackend:
    """Returns the backend of the state holder that torch has made."""
    return handler._state_holder._backend


def store_of(handler: DynamicRendezvousHandler) -> Store:
    """Returns the store by which torch's agents exchange values in a round."""
    return handler._store


def replace_parts(
    handler: DynamicRendezvousHandler,
    node: NodeDesc,
    holder: RendezvousStateHolder,
    executor: OpExecutor,
    record: Callable[..., None],
) -> None:
    """Gives torch's handler another description of this agent, state holder, executor and record.

    Args:
        handler: torch's.
        node: this agent.
        holder: this agent's copy of the shared state.
        executor: executes the actions of torch's operations.
        record: the method that records events.
    """
    handler._this_node, handler._state_holder, handler._op_executor, handler._record = node, holder, executor, record


def stop_heartbeats(handler: DynamicRendezvousHandler) -> None:
    """Ends the thread that keeps this agent alive in the shared state."""
    handler._stop_heartbeats()


def forget_worker_store(handler: DynamicRendezvousHandler) -> None:
    """Makes torch's handler use a new store for the workers of the next round."""
    for name in (name for names in CACHES.values() for name in names):
        if has_name(handler, name.name):
            setattr(handler, name.name, None)


def is_in_bad_fork() -> bool:
    """Returns whether CUDA was used before this process was forked."""
    return bool(torch.cuda._is_in_bad_fork())


def outputs_of(handler: Any) -> list[int] | None:
    """Returns a worker's descriptors of stdout and stderr; None if this torch does not tell.

    Args:
        handler: torch's SubprocessHandler, which starts the worker.
    """
    if missing_in(OUTPUTS, handler):
        return None
    files = (handler._stdout, handler._stderr)
    return [file.fileno() if file else number for number, file in enumerate(files, 1)]
