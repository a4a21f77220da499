"""Tests how daemons reach one another, and that only proved answers count."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from reft.cli.demo.cluster import free_port
from reft.wire import messages, proof, rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.peers import channels
from reft_daemon.peers.channels import PeerChannels, UnprovedReply, reason_of
from tests.support.proving import ProvingServer, serving

TRIES = 8  # after this many failures in a row gRPC waits a second before the next try
TOKEN, OTHER_TOKEN = bytes(range(32)), bytes(32)
BACK = pb.InventoryReply(node="back")
SILENT = "its answer has no proof"


@contextlib.asynccontextmanager
async def peers_of(*own: str) -> AsyncIterator[PeerChannels]:
    peers = PeerChannels(None, own)
    try:
        yield peers
    finally:
        await peers.close()


def node_at(*addresses: str, ident: str = "id") -> pb.Node:
    return pb.Node(name="n", id=ident, addresses=addresses)


async def inventory(peers: PeerChannels, node: pb.Node, reconnect: bool = False, token: bytes = TOKEN) -> str:
    request = pb.InventoryRequest(job="job")
    return (await peers.call(node, [token], pb_grpc.DaemonStub, "Inventory", request, 10.0, reconnect=reconnect)).node


async def pieces_of(peers: PeerChannels, node: pb.Node) -> list[bytes]:
    return [piece async for piece in peers.pieces(node, [TOKEN], pb.ReadRequest(job="job"), 10.0)]


async def test_a_host_that_was_unreachable_before_is_tried_again():
    """A node comes back while gRPC pauses between two tries: a restore's plan needs that node."""
    address = f"127.0.0.1:{free_port()}"
    async with peers_of() as peers:
        for _ in range(TRIES):
            for each in peers._channels.values():
                await pauses(each.channel)
            with pytest.raises(grpc.RpcError):
                await inventory(peers, node_at(address))
        async with serving(ProvingServer("id", TOKEN, reply=BACK), address):
            assert await inventory(peers, node_at(address), reconnect=True) == "back"


async def pauses(channel: grpc.aio.Channel) -> None:
    """Returns once a try to connect has failed."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
        await channel.wait_for_state_change(state)


async def test_a_new_challenge_is_taken_once_and_kept():
    server = ProvingServer("id", TOKEN, reply=BACK)
    async with serving(server) as address, peers_of() as peers:
        assert [await inventory(peers, node_at(address)) for _ in range(3)] == ["back"] * 3
        assert await pieces_of(peers, node_at(address)) == [b"piece"]
        assert len(server.received) == 2 * 5, "the first call was sent twice, all others once"
        server.challenges = proof.Challenges("id")  # a restart
        assert await pieces_of(peers, node_at(address)) == [b"piece"]
        assert len(server.received) == 2 * 7
        assert TOKEN not in repr(server.received).encode("latin-1") and repr(TOKEN)[2:-1] not in repr(server.received)


async def test_the_node_of_an_address_from_a_person_is_asked():
    async with serving(ProvingServer("its id", TOKEN, reply=BACK)) as address, peers_of() as peers:
        assert await inventory(peers, node_at(address, ident="")) == "back"


async def test_a_node_does_not_answer_for_another_one():
    async with serving(ProvingServer("new id", TOKEN, reply=BACK)) as address, peers_of() as peers:
        with pytest.raises(UnprovedReply, match="unproved: this call needs a proof"):
            await inventory(peers, node_at(address, ident="old id"))


async def test_a_node_that_missed_an_attach_takes_an_older_token(caplog):
    server = ProvingServer("id", OTHER_TOKEN, reply=BACK)
    async with serving(server) as address, peers_of() as peers:
        request, tokens = pb.InventoryRequest(job="job"), [b"newest" * 5, TOKEN, OTHER_TOKEN]
        for _ in range(2):
            await peers.call(node_at(address), tokens, pb_grpc.DaemonStub, "Inventory", request, 10.0)
        assert len(server.received) == 2 * 5, (
            "the first call, its challenge, two older tokens; then the last one at once"
        )
    assert not caplog.records


async def test_a_daemon_that_proves_one_job_of_two_is_said_once(caplog):
    async with serving(ProvingServer("id", OTHER_TOKEN, reply=BACK)) as address, peers_of() as peers:
        for _ in range(3):
            request = pb.InventoryRequest(job="job")
            await peers.call(node_at(address), [OTHER_TOKEN], pb_grpc.DaemonStub, "Inventory", request, 10.0)
            with pytest.raises(UnprovedReply):
                await inventory(peers, node_at(address))
    assert len(caplog.records) == 1


STATUSES = [grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.ABORTED,
            grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED]  # fmt: skip


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("knows", [None, OTHER_TOKEN], ids=["no-token", "other-token"])
async def test_a_rogue_server_counts_as_silent_and_learns_nothing(status, knows, caplog):
    """It sits on a dead daemon's port, and answers everything."""
    rogue = ProvingServer("id", knows, status, reply=pb.InventoryReply(node="rogue", had_whole=True))
    async with serving(rogue) as address, peers_of() as peers:
        for _ in range(2):
            for ask in (inventory, pieces_of):
                with pytest.raises(grpc.RpcError) as error:
                    await ask(peers, node_at(address))
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE and SILENT in reason_of(error.value)
        decide = pb.DecideRequest(manifest=pb.Manifest(job="job", token=TOKEN))
        with pytest.raises(grpc.RpcError):
            await peers.call(node_at(address), [TOKEN], pb_grpc.DaemonStub, "Decide", decide, 10.0)
        await peers.close()
    assert len(rogue.received) >= 10
    assert all(TOKEN not in each for each in rogue.received if isinstance(each, bytes))
    assert all(TOKEN not in each for metadata in rogue.received[::2] for _, each in metadata if isinstance(each, bytes))
    assert [record.getMessage().count(SILENT) for record in caplog.records] == [1], "said once"


@pytest.mark.parametrize("status", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.ABORTED])
async def test_a_proved_error_is_what_it_says(status):
    async with serving(ProvingServer("id", TOKEN, status)) as address, peers_of() as peers:
        for ask in (inventory, pieces_of):
            with pytest.raises(grpc.RpcError) as error:
                await ask(peers, node_at(address))
            assert (error.value.code(), reason_of(error.value)) == (status, "why")


class AlteringServer(ProvingServer):
    """Passes on what the true daemon proves, and changes the reply."""

    def _proof_of(self, call, content):
        return super()._proof_of(call, content + b"\0")


@pytest.mark.parametrize("status", [grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND])
async def test_a_reply_that_was_changed_on_its_way_counts_as_none(status):
    async with serving(AlteringServer("id", TOKEN, status, reply=BACK)) as address, peers_of() as peers:
        with pytest.raises(UnprovedReply):
            await inventory(peers, node_at(address))


class InventingServer(ProvingServer):
    """Wants another challenge each time."""

    async def _proved(self, method, metadata, context):
        self.challenges = proof.Challenges("id")
        return await super()._proved(method, metadata, context)


async def test_a_server_that_invents_challenges_can_only_refuse():
    server = InventingServer("id", TOKEN, reply=BACK)
    async with serving(server) as address, peers_of() as peers:
        with pytest.raises(UnprovedReply):
            await inventory(peers, node_at(address))
        assert len(server.received) == 4, "one more try, no more"


async def test_texts_without_a_proof_are_short_and_plain():
    error = UnprovedReply(grpc.StatusCode.NOT_FOUND, "a\nb\x1b[31m" + "x" * 10_000, b"")
    assert reason_of(error) == f"its answer has no proof (NOT_FOUND, unproved: a b [31m{'x' * 292})"


async def test_tokens_in_messages_are_veiled_both_ways():
    manifest = pb.Manifest(job="job", token=TOKEN)
    server = ProvingServer("id", TOKEN, reply=pb.InventoryReply(manifest=manifest))
    async with serving(server) as address, peers_of() as peers:
        request = pb.RebuildRequest(manifest=manifest)
        reply = await peers.call(node_at(address), [TOKEN], pb_grpc.DaemonStub, "Inventory", request, 10.0)
        assert reply.manifest == request.manifest == manifest
        assert not any(TOKEN in each for each in server.received if isinstance(each, bytes))


# Channels that nobody uses


async def test_channels_to_dead_addresses_are_closed(monkeypatch):
    dead = f"127.0.0.1:{free_port()}"
    async with serving(ProvingServer("id", TOKEN, reply=BACK)) as address, peers_of() as peers:
        await inventory(peers, node_at(address))
        with pytest.raises(grpc.RpcError):
            await inventory(peers, node_at(dead))
        await peers.close_unused()
        assert set(peers._channels) == {address, dead}
        peers._channels[dead].answered_s -= channels.UNUSED_S + 1
        with channels._in_use(peers._channels[dead]):
            await peers.close_unused()
            assert dead in peers._channels, "a call is under way"
        await peers.close_unused()
        assert set(peers._channels) == {address}


# Unix sockets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def listen(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return f"unix:{path}"


async def refused(peers: PeerChannels, address: str, match: str) -> bool:
    with pytest.raises(OSError, match=match):
        await inventory(peers, node_at(address))
    assert not peers._channels, "no connection was tried"
    return True


async def test_a_unix_socket_counts_only_in_a_private_folder(folder):
    address, made = listen(folder / "d.sock"), folder / "link.sock"
    made.symlink_to(folder / "d.sock")
    (folder / "file").touch()
    async with peers_of() as peers:
        for name in ("link.sock", "file"):
            assert await refused(peers, f"unix:{folder / name}", "mode 0700")
        for mode in (0o750, 0o701, 0o777):
            folder.chmod(mode)
            assert await refused(peers, address, "mode 0700")
            assert await refused(peers, f"unix:{folder / 'none.sock'}", "mode 0700")
        assert await refused(peers, f"unix:{folder / 'none' / 'd.sock'}", "No such file")
        folder.chmod(0o700)
        for each in (address, f"unix:{folder / 'none.sock'}"):  # a daemon that restarts makes it again
            with pytest.raises(grpc.RpcError) as error:
                await inventory(peers, node_at(each))
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
async def test_a_unix_socket_of_another_user_does_not_count(folder):
    address = listen(folder / "d.sock")
    os.chown(folder / "d.sock", 12345, -1)
    async with peers_of() as peers:
        assert await refused(peers, address, "mode 0700")
        os.chown(folder / "d.sock", os.geteuid(), -1)
        os.chown(folder, 12345, -1)
        assert await refused(peers, address, "mode 0700")


async def test_no_path_leads_back_to_this_daemon(folder):
    own = listen(folder / "d.sock")
    os.link(folder / "d.sock", folder / "hard.sock")
    (folder / "sub").mkdir(mode=0o700)
    (folder / "alias").symlink_to(folder)
    aliases = [folder / "hard.sock", folder / "sub" / ".." / "d.sock", Path(f"{folder}//d.sock")]
    async with peers_of(own) as peers:
        for alias in aliases[:2]:
            assert await refused(peers, f"unix:{alias}", "own socket")
        with pytest.raises(ConnectionError, match="mode 0700"):  # a folder that is a link
            await inventory(peers, node_at(f"unix:{folder / 'alias' / 'd.sock'}"))


async def test_a_daemon_on_a_unix_socket_needs_no_proof(folder):
    server = grpc.aio.server(options=rpc.OPTIONS)
    received = []

    class Local(pb_grpc.DaemonServicer):
        async def Inventory(self, request, context):
            received.append((request, dict(context.invocation_metadata())))
            return BACK

    pb_grpc.add_DaemonServicer_to_server(Local(), server)
    server.add_insecure_port(f"unix:{folder / 'd.sock'}")
    await server.start()
    async with peers_of() as peers:
        assert await inventory(peers, node_at(f"unix:{folder / 'd.sock'}")) == "back"
    await server.stop(0)
    ((request, metadata),) = received
    assert messages.job_of(request) == "job" and proof.PROOF_KEY not in metadata


async def test_a_large_request_follows_the_challenge_on_each_new_connection():
    """With a wrong challenge its bytes would fill what a callee takes before a proof."""
    address, bodies = f"127.0.0.1:{free_port()}", []
    large = pb.InventoryRequest(job="job", known=range(channels.SMALL))
    async with peers_of() as peers:
        for _ in range(2):  # the second time the daemon was restarted, so its challenge is another one
            answers = ProvingServer("id", TOKEN)
            async with serving(answers, address):
                await peers.call(
                    node_at(address), [TOKEN], pb_grpc.DaemonStub, "Inventory", large, 10.0, reconnect=True
                )
            bodies += [len(each) for each in answers.received if isinstance(each, bytes)]
    assert [nbytes > channels.SMALL for nbytes in bodies] == [False, True] * 2


class NotingServer(ProvingServer):
    """Notes each call: its method, whether it is large, and the token that it proves."""

    def __init__(self, token: bytes) -> None:
        super().__init__("id", token, reply=pb.KeepReply())
        self.calls: list[tuple[str, bool, bool]] = []

    async def _answer(self, details, data, context):
        before = self.proved
        try:
            return await super()._answer(details, data, context)
        finally:
            self.calls.append((details.method.rpartition("/")[2], len(data) > channels.SMALL, self.proved > before))


def keep_of(nbytes: int) -> pb.KeepRequest:
    """Returns a request of exactly this size, of the kind that carries capsules."""
    request, pad = pb.KeepRequest(job="job"), nbytes
    while request.ByteSize() != nbytes:
        del request.capsules[:]
        request.capsules.add(capsule=bytes(pad))
        pad -= request.ByteSize() - nbytes
    return request


async def keep(peers: PeerChannels, address: str, nbytes: int, *tokens: bytes) -> None:
    request = keep_of(nbytes)
    await peers.call(node_at(address), tokens, pb_grpc.PeerStub, "Keep", request, 10.0)


NEWEST, LARGE, SMALL = b"n" * 32, channels.SMALL + 1, channels.SMALL
HELLO, REFUSED, TRIED = ("Hello", False, False), ("Status", False, False), ("Status", False, True)


async def test_a_large_request_follows_a_small_one_that_has_proved_its_token():
    """Its bytes under a token that is not taken would hold up all calls of the connection."""
    server = NotingServer(OTHER_TOKEN)
    async with serving(server) as address, peers_of() as peers:
        for _ in range(2):
            await keep(peers, address, LARGE, NEWEST, TOKEN, OTHER_TOKEN)
        await keep(peers, address, LARGE, OTHER_TOKEN, NEWEST)
    assert server.calls[:5] == [HELLO, *[REFUSED] * 3, TRIED], "the newest one twice: Hello told a new challenge"
    assert server.calls[5:] == [("Keep", True, True)] * 3, "the proved token is tried no more"


async def test_a_large_request_under_tokens_that_nobody_takes_never_leaves():
    server = NotingServer(OTHER_TOKEN)
    async with serving(server) as address, peers_of() as peers:
        for _ in range(2):
            with pytest.raises(UnprovedReply):
                await keep(peers, address, LARGE, NEWEST, TOKEN)
    assert server.calls == [HELLO, *[REFUSED] * 5]


async def test_a_small_request_needs_no_other_before():
    server = NotingServer(OTHER_TOKEN)
    async with serving(server) as address, peers_of() as peers:
        await keep(peers, address, SMALL, NEWEST, OTHER_TOKEN)
    refused, kept = ("Keep", False, False), ("Keep", False, True)
    assert server.calls == [refused, refused, kept], "without the challenge, under the newest token, under the other"


class FalseServer(NotingServer):
    """Says that it takes each token, and proves none."""

    def _proof_of(self, call, content):
        return super()._proof_of(call, content + b"\0")


async def test_a_large_request_leaves_for_nobody_who_only_says_that_a_token_is_taken():
    server = FalseServer(TOKEN)
    async with serving(server) as address, peers_of() as peers:
        with pytest.raises(UnprovedReply):
            await keep(peers, address, LARGE, TOKEN, NEWEST)
    assert not any(is_large for _, is_large, _ in server.calls)
