"""Finds or starts this node's daemon.

It also collects the facts that the agent tells the other agents.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc
from torch.distributed.elastic.rendezvous import RendezvousParameters

from reft.config import Config
from reft.console import say
from reft.elastic.options import text
from reft.elastic.shared_state import PLAIN, AgentFacts
from reft.errors import ConfigError, ReftError
from reft.wire import daemon_launcher, local_socket, rpc
from reft.wire.daemon_launcher import DaemonRestarter
from reft.wire.process import Process, machine, mark_of
from reft.wire.tls import Tls
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

# A documentation address (RFC 5737). The route to it is the default route.
ELSEWHERE = "192.0.2.1"


def has_ended(process: str) -> bool:
    """Returns whether a process (`mark_of`) has ended; False if this machine can't know."""
    host, _, rest = process.partition("/")
    pid, _, start = rest.partition("/")
    if host != machine() or not pid.isdecimal() or not start.isdecimal():
        return False
    try:
        return not Process(int(pid), int(start)).is_alive
    except OSError:
        return False


# A daemon's address, what restarts the daemon, and the certificates for calls to other daemons.
OwnDaemon = tuple[str, DaemonRestarter, Tls | None]


def resolve_node(parameters: RendezvousParameters) -> tuple[AgentFacts, OwnDaemon | None]:
    """Returns this agent's facts, and its daemon; None: there is none.

    Starts a daemon if none was named and none runs. A named one may start beside the agent, so it
    gets some seconds: without it the agent would hear no signals, and give no job key on.

    Raises:
        ConfigError: an option is not valid.
    """
    daemon_option = text(parameters, "daemon")
    if daemon_option not in ("auto", "off"):
        raise ConfigError(f"--rdzv-conf daemon={daemon_option} is not valid: use auto or off.")
    process = mark_of(os.getpid())
    settings = Config.load()
    if daemon_option == "off" or settings.mode == "off":
        return AgentFacts(process), None
    certificates = tls()
    flags = _flags(parameters, certificates)
    try:
        address, hello = daemon_launcher.find(settings, flags, is_restart=True)
        pid = local_socket.introduce(hello.local_socket, daemon_launcher.HELLO_DEADLINE_S).process.pid
        daemon_launcher.hello(address, agent_pid=pid)
    except ReftError as error:
        # Not fatal: the agent then behaves as torch's own. Trainers report the error when they
        # attach.
        say(f"this node has no reft-daemon, so lost nodes are found late. Cause: {error}")
        return AgentFacts(process), None
    if parameters.max_nodes > 1 and all(each.startswith("unix:") for each in hello.addresses):
        say(
            "other nodes can't reach this node's daemon, so the job can't survive the loss of a node.\n"
            "Fix: start reft-daemon before torchrun, with --listen and its own certificate (examples/deploy/README.md), "
            "or set REFT_INSECURE=1 on a trusted network"
        )
    elif parameters.max_nodes > 1 and hello.tls:
        _check_certificates(certificates, hello.node)
    whose = _whose(certificates, hello)
    facts = AgentFacts(process, hello.node_id, hello.node, hello.domain, tuple(hello.addresses), whose)
    return facts, (address, DaemonRestarter(settings, hello.unattended, flags, pid), certificates)


def _check_certificates(certificates: Tls | None, node: str) -> None:
    """Says why the daemons of other nodes will refuse this agent, if they will.

    Args:
        certificates: of this agent.
        node: name of this node, as its daemon has told.
    """
    if certificates is None:
        say(
            "the daemons use TLS, and this agent has no certificates. So other nodes do not hear this agent, and learn late if "
            "this node is lost. Set REFT_TLS_CERT, REFT_TLS_KEY and REFT_TLS_CA for torchrun too."
        )
    elif not certificates.role.is_on(node):
        say(
            f"REFT_TLS_CERT is of the {certificates.role}, and this agent is on node {node}. So other nodes do not hear this "
            "agent, and learn late if this node is lost. Give torchrun the certificate that "
            "examples/deploy/certificates.sh makes for agents of this node."
        )


def _whose(certificates: Tls | None, hello: pb.HelloReply) -> str:
    """Returns with what this node's daemon calls others; see `AgentFacts.certificates`.

    Args:
        certificates: of this agent. Those of its daemon are of the same user.
        hello: the answer of the daemon.
    """
    if hello.tls:
        return f"user {certificates.role.user}" if certificates else ""
    return "" if all(each.startswith("unix:") for each in hello.addresses) else PLAIN


def _flags(parameters: RendezvousParameters, certificates: Tls | None) -> list[str]:
    """Returns the flags for a daemon that is started now.

    In a job of several nodes the daemon must listen on an address that other nodes can reach. With
    the certificate of an agent it can't: it would serve with a key that is no daemon's.
    """
    host = parameters.local_addr or own_host(parameters.endpoint)
    if certificates:
        may_listen = bool(certificates.role.node)
    else:
        may_listen = "REFT_INSECURE" in os.environ or host.startswith("127.")
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    return ["--listen", listen] if parameters.max_nodes > 1 and "REFT_LISTEN" not in os.environ and may_listen else []


def own_host(endpoint: str) -> str:
    """Returns the host name or address by which other nodes reach this one.

    This is the machine's name. If the name resolves to loopback here, it is the local address of
    the route to the endpoint.

    Args:
        endpoint: of the rendezvous store, as given to torchrun.
    """
    name = socket.getfqdn()
    if not rpc.is_loopback(name):
        return name
    first = endpoint.rpartition("://")[2].partition(",")[0]
    host = (first.rpartition(":")[0] or first).strip("[]")
    if host in ("", "localhost", "::1") or host.startswith("127."):
        return "127.0.0.1"  # all nodes are on this machine
    candidates = (_address_towards(each) for each in (host, ELSEWHERE))
    return next((each for each in candidates if each and not rpc.is_loopback(each)), name)


def _address_towards(host: str) -> str:
    """Returns this machine's source address for a route to `host`.

    It is empty if there is no route.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # connecting a UDP socket sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def free_under_slurm(address: str, job: str) -> None:
    """Frees the slots of a job that ended without failure.

    It does so if the job runs under Slurm. Slurm kills the daemon together with the agent's step or
    batch script. A killed daemon can't free the slots later, and they would fill /dev/shm for the
    next user. Checkpoints stay, and a later start under the job's name goes on from them.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return
    with rpc.channel(address) as channel:
        try:
            pb_grpc.DaemonStub(channel).Purge(
                pb.PurgeRequest(job=job, memory_only=True), timeout=daemon_launcher.HELLO_DEADLINE_S
            )
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                say(f"the slots of job {job} stay in /dev/shm: {rpc.error_of(error, address)}")


def tls() -> Tls | None:
    """Returns the certificates for calls to daemons of other nodes; None if there are none.

    They are those of REFT_TLS_CERT, REFT_TLS_KEY and REFT_TLS_CA.
    """
    paths = [os.environ.get(f"REFT_TLS_{name}", "") for name in ("CERT", "KEY", "CA")]
    if not all(paths):
        return None
    try:
        certificates = Tls(*map(Path, paths))
    except ConfigError as error:
        say(f"other nodes do not hear this agent, and learn late if this node is lost: {error}")
        return None
    certificates.watch()
    return certificates
