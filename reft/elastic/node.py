"""The node of an agent: its daemon, and what the agent says of itself to the others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc
from torch.distributed.elastic.rendezvous import RendezvousParameters

from reft.config import Config
from reft.console import say
from reft.elastic.options import text
from reft.elastic.shared_state import AgentFacts
from reft.errors import ConfigError, ReftError
from reft.wire import daemon_launcher, local_socket, rpc
from reft.wire.daemon_launcher import DaemonRestarter
from reft.wire.process import Process, machine, mark_of
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

ELSEWHERE = "192.0.2.1"  # an address that is nobody's (RFC 5737): the way there is that of the default route


def has_ended(process: str) -> bool:
    """Whether a process that `mark_of` named has ended. False if this machine can't know."""
    where, _, rest = process.partition("/")
    pid, _, start = rest.partition("/")
    if where != machine() or not pid.isdigit() or not start.isdigit():
        return False
    try:
        return not Process(int(pid), int(start)).is_alive
    except OSError:
        return False


def resolve_node(parameters: RendezvousParameters) -> tuple[AgentFacts, tuple[str, DaemonRestarter] | None]:
    """What this agent says of itself; its daemon's address and who starts that daemon again, None if there is none.

    It starts one if none runs.

    Raises:
        ConfigError: an option is not allowed.
    """
    wanted = text(parameters, "daemon")
    if wanted not in ("auto", "off"):
        raise ConfigError(f"--rdzv-conf daemon={wanted}: it can be auto or off.")
    process = mark_of(os.getpid())
    settings = Config.load()
    if wanted == "off" or settings.mode == "off":
        return AgentFacts(process), None
    flags = _flags(parameters)
    try:
        address, hello = daemon_launcher.find(settings, flags)
        pid = local_socket.introduce(hello.local_socket, daemon_launcher.HELLO_DEADLINE_S).process.pid
        daemon_launcher.hello(address, agent_pid=pid)
    except ReftError as error:  # trainers say the same when they attach; agents without a daemon are as torch has them
        say(f"this node has no daemon: lost nodes are found late. {error}")
        return AgentFacts(process), None
    if parameters.max_nodes > 1 and all(each.startswith("unix:") for each in hello.addresses):
        say(
            "this node's daemon can't be reached by other nodes, and without that no node's loss is survived: set REFT_TLS_CERT, "
            "REFT_TLS_KEY and REFT_TLS_CA, or REFT_INSECURE=1 on a network that you trust, before one is started."
        )
    elif parameters.max_nodes > 1 and hello.tls and "REFT_TLS_CERT" not in os.environ:
        say(
            "the daemons ask for certificates, and this agent has none: other nodes do not hear it, and find out late if this "
            "one is lost. Set REFT_TLS_CERT, REFT_TLS_KEY and REFT_TLS_CA for torchrun too."
        )
    facts = AgentFacts(process, hello.node_id, hello.node, hello.domain, tuple(hello.addresses))
    return facts, (address, DaemonRestarter(settings, hello.unattended, flags, pid))


def _flags(parameters: RendezvousParameters) -> list[str]:
    """For a daemon that is started now: on several nodes it must be reached by the others."""
    host = parameters.local_addr or own_host(parameters.endpoint)
    is_safe = "REFT_TLS_CERT" in os.environ or "REFT_INSECURE" in os.environ or host.startswith("127.")
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    return ["--listen", listen] if parameters.max_nodes > 1 and "REFT_LISTEN" not in os.environ and is_safe else []


def own_host(endpoint: str) -> str:
    """By which host other nodes find this one: its name; where that is loopback here, its address towards the endpoint.

    Args:
        endpoint: of the rendezvous store, as torchrun takes it.
    """
    name = socket.getfqdn()
    if not rpc.is_loopback(name):
        return name
    first = endpoint.rpartition("://")[2].partition(",")[0]
    host = (first.rpartition(":")[0] or first).strip("[]")
    if host in ("", "localhost", "::1") or host.startswith("127."):
        return "127.0.0.1"  # the other nodes are on this machine too
    towards = (_address_towards(each) for each in (host, ELSEWHERE))
    return next((each for each in towards if each and not rpc.is_loopback(each)), name)


def _address_towards(host: str) -> str:
    """This machine's address from which it would send to a host; empty if it has none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def free_under_slurm(address: str, job: str) -> None:
    """Under Slurm frees the slots of a job that has ended as it should: with this agent's step, or batch script, Slurm kills
    the daemon that an agent has started, which can't free them later, and they would fill /dev/shm for the next user."""
    if "SLURM_JOB_ID" not in os.environ:
        return
    with rpc.channel(address) as channel:
        try:
            pb_grpc.DaemonStub(channel).Purge(pb.PurgeRequest(job=job), timeout=daemon_launcher.HELLO_DEADLINE_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                say(f"what is held of job {job} stays in /dev/shm: {rpc.error_of(error, address)}")


def tls() -> Tls | None:
    """What the daemons of other nodes are called with: as this node's daemon has it, from REFT_TLS_CERT, _KEY and _CA."""
    given = [os.environ.get(f"REFT_TLS_{name}", "") for name in ("CERT", "KEY", "CA")]
    if not all(given):
        return None
    try:
        found = Tls(*map(Path, given))
    except ConfigError as error:
        say(f"other nodes' daemons do not hear this agent, and find out late if this node is lost: {error}")
        return None
    found.watch()
    return found
