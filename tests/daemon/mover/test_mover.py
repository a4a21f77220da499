"""Tests real mover processes: parity as the oracle says, deaths, cancelled pulls, limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reft.core.coding.exchange import guard_lanes
from reft.core.coding.turn_pace import fixed_limit
from reft.core.commit.slots import SlotState
from reft.wire.tls import Tls
from reft_daemon.child.child_process import ChildGone
from reft_daemon.mover.child import CommandServer
from reft_daemon.mover.mover import Mover, MoverSettings, ParityWriter, PullFailed, SourceSlot
from reft_daemon.mover.range_client import MoverAddress, RangePull
from reft_daemon.mover.range_protocol import PULLS_MAX, RangeStatus
from tests.support.certificates import Certificates, why_not
from tests.support.parity import CHUNK, SectionSource, at, expected_parity, memory_slot, section_source
from tests.support.two_level import expected_parity as expected_parities

LANE = bytes(range(16))
PIECE = 4 * CHUNK


def run(act: Callable[[Mover], Coroutine[Any, Any, None]], settings: MoverSettings = MoverSettings()) -> None:  # noqa: B008
    """Runs a test with a mover, which is its own source."""

    async def with_mover() -> None:
        mover = Mover(settings)
        try:
            await asyncio.wait_for(act(mover), 60)
        finally:
            await mover.close()

    asyncio.run(with_mover())


def offered(sources: Sequence[SectionSource]) -> list[SourceSlot]:
    return [SourceSlot(source.slot, *source.place) for source in sources]


async def pulled(
    mover: Mover, writer: ParityWriter, sources: Sequence[SectionSource], source: SectionSource,
    ranges: Sequence[tuple[int, int, int]], name: str = "localhost",
) -> None:  # fmt: skip
    ticket, port = await mover.grant("job", offered(sources))
    address = MoverAddress("127.0.0.1", port, name)
    await writer.pull(RangePull(address, ticket, at(7), source.rank, ranges), 30)


def piece_ranges(nbytes: int, piece: int, piece_bytes: int = PIECE) -> list[tuple[int, int, int]]:
    """Cuts a piece of a section into ranges of at most three chunks."""
    begin, end = min(piece * piece_bytes, nbytes), min((piece + 1) * piece_bytes, nbytes)
    return [(first, first - begin, min(3 * CHUNK, end - first)) for first in range(begin, end, 3 * CHUNK)]


def pid_of(mover: Mover) -> int:
    return mover.child.running.process.pid


def text_of(mover: Mover, name: str) -> str:
    return Path(f"/proc/{pid_of(mover)}/{name}").read_text()


async def new_writer(mover: Mover, slot, nbytes: int = PIECE) -> ParityWriter:
    return await mover.begin("job", slot, at(7), LANE, nbytes)


def test_the_bytes_of_a_turn_decide_the_pace_and_the_log_says_it_once(caplog):
    caplog.set_level("INFO", "reft.daemon")

    async def act(mover: Mover) -> None:
        grants: list[tuple[object, ...]] = []
        server = SimpleNamespace(grant=lambda *arguments: grants.append(arguments))
        theirs = CommandServer(socket.socketpair()[0], server)
        call = mover.child.call

        async def listened(running, message, *rest):
            if message["do"] == "grant":
                theirs._grant({**message, "id": 1}, [])
            return await call(running, message, *rest)

        mover.child.call = listened
        for sent_bytes in (1 << 20, 1 << 20, 1 << 19):
            await mover.grant("job", [], sent_bytes)
        assert [pace for _, _, pace in grants] == [1 << 20, 1 << 20, 0]

    run(act, MoverSettings(limit=fixed_limit(1 << 20)))
    lines = [record.getMessage() for record in caplog.records if "a turn sends" in record.getMessage()]
    assert lines == [
        "job=job a turn sends 1.0 MiB from here, at most 1.0 MiB a second: --protect-bandwidth",
        "job=job a turn sends 512.0 KiB from here, not paced: a turn fits into one second of the limit",
    ]


@pytest.mark.parametrize("D", range(2, 7))
def test_the_parity_of_each_holder_is_that_of_the_drawing(D):
    noise = random.Random(D)
    sizes = [(D - 1) * PIECE - (noise.randrange(2 * PIECE) if D > 2 else 0) * (i % 2) for i in range(D)]
    sources = [section_source(rank, size, at(7)) for rank, size in enumerate(sizes)]

    async def fold_all(mover: Mover) -> None:
        for holder in range(D):
            slot = memory_slot("parity", holder, PIECE)
            slot.map.data[:] = 255  # an earlier parity
            writer = await new_writer(mover, slot)
            assert slot.map.reread().state is SlotState.WRITING
            for source in sources[:holder] + sources[holder + 1 :]:
                piece = (holder - source.rank - 1) % D
                await pulled(mover, writer, sources, source, piece_ranges(sizes[source.rank], piece))
            await writer.seal()
            header = slot.map.reread()
            assert (header.state, header.version, header.layout) == (SlotState.SEALED, at(7), LANE)
            assert slot.map.bad_chunks() == []
            assert slot.map.data[:PIECE].tobytes() == expected_parity([s.section for s in sources], holder, PIECE)
        assert mover.child.moved_bytes == sum(sizes)

    run(fold_all)


def test_a_dead_mover_leaves_the_slot_unsealed_and_the_next_one_begins_anew():
    source, slot = section_source(1, PIECE, at(7)), memory_slot("parity", 0, PIECE)
    ranges = piece_ranges(PIECE, 0)

    async def act(mover: Mover) -> None:
        for folded in range(len(ranges)):
            writer = await new_writer(mover, slot)
            await pulled(mover, writer, [source], source, ranges[:folded])
            os.kill(pid_of(mover), signal.SIGKILL)
            with pytest.raises(ChildGone):
                await writer.seal()
            assert slot.map.reread().state is SlotState.WRITING
        writer = await new_writer(mover, slot)
        await pulled(mover, writer, [source], source, ranges)
        await writer.seal()
        assert slot.map.data[:PIECE].tobytes() == source.section

    run(act)


def test_a_refused_pull_counts_what_it_has_folded():
    source, slot = section_source(1, PIECE, at(7)), memory_slot("parity", 0, PIECE)
    source.slot.map.data[CHUNK + 2 * CHUNK] ^= 1
    ranges = [(chunk * CHUNK, chunk * CHUNK, CHUNK) for chunk in range(4)]

    async def act(mover: Mover) -> None:
        writer = await new_writer(mover, slot)
        with pytest.raises(PullFailed, match="changed in memory") as failed:
            await pulled(mover, writer, [source], source, ranges)
        assert (failed.value.folded, failed.value.status) == (2, RangeStatus.DAMAGED)
        source.slot.map.data[CHUNK + 2 * CHUNK] ^= 1
        await pulled(mover, writer, [source], source, ranges[failed.value.folded :])
        await writer.seal()
        assert slot.map.data[:PIECE].tobytes() == source.section

    run(act)


def test_a_cancelled_pull_has_ended_before_its_caller_goes_on():
    """The source admits the connection, and then sends nothing."""
    slot = memory_slot("parity", 0, PIECE)

    async def act(mover: Mover) -> None:
        asked = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(40)
            writer.write(bytes(16))
            await reader.readexactly(48)
            asked.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        address = MoverAddress("127.0.0.1", server.sockets[0].getsockname()[1], "localhost")
        writer = await new_writer(mover, slot)
        ranges = piece_ranges(PIECE, 0)
        pull = asyncio.ensure_future(writer.pull(RangePull(address, bytes(32), at(7), 1, ranges), 60))
        await asked.wait()
        pid, take, answers = pid_of(mover), mover.child._take, []
        mover.child._take = lambda running, message, passed: (answers.append(message), take(running, message, passed))
        pull.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pull
        assert pull.cancelled() and len(answers) == 1 and answers[0]["count"] == 0
        assert pid_of(mover) == pid, "the mover answered, and was not killed"
        await writer.drop()
        await mover.forget("job")
        server.close()

    run(act)


def test_a_slot_is_begun_and_sealed_while_as_many_pulls_as_may_be_are_at_work():
    """The source admits the connections, and then sends nothing."""

    async def act(mover: Mover) -> None:
        connections: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(40)
            writer.write(bytes(16))
            await reader.readexactly(48)
            connections.put_nowait(writer)

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        address = MoverAddress("127.0.0.1", server.sockets[0].getsockname()[1], "localhost")
        writer = await new_writer(mover, memory_slot("parity", 0, PIECE))
        pull = RangePull(address, bytes(32), at(7), 1, piece_ranges(PIECE, 0))
        pulls = [asyncio.ensure_future(writer.pull(pull, 60)) for _ in range(PULLS_MAX)]
        opened = [await connections.get() for _ in pulls]
        await (await new_writer(mover, memory_slot("parity", 1, PIECE))).seal()
        under_way = [not each.done() for each in pulls]
        for each in opened:
            each.close()
        await asyncio.wait(pulls)
        assert all(under_way) and all(isinstance(each.exception(), PullFailed) for each in pulls)
        server.close()

    run(act)


def test_a_forgotten_job_is_mapped_no_more():
    source, slot = section_source(1, PIECE, at(7)), memory_slot("reft-parity-map", 0, PIECE)

    async def act(mover: Mover) -> None:
        writer = await new_writer(mover, slot)
        await pulled(mover, writer, [source], source, piece_ranges(PIECE, 0))
        assert "reft-parity-map" in text_of(mover, "maps") and "rank-1.slot-0" in text_of(mover, "maps")
        await mover.forget("job")
        assert "reft-parity-map" not in text_of(mover, "maps") and "rank-1.slot-0" not in text_of(mover, "maps")
        with pytest.raises(PullFailed):
            await pulled(mover, writer, [], source, piece_ranges(PIECE, 0))

    run(act)


def test_the_mover_is_the_kernels_first_victim_and_ends_with_its_daemon():
    async def act(mover: Mover) -> None:
        await mover.port()
        assert int(text_of(mover, "oom_score_adj")) == 900
        asyncio.get_running_loop().remove_reader(mover.child.running.channel)  # else the daemon would kill it
        mover.child.running.channel.shutdown(socket.SHUT_RDWR)  # as at the daemon's death
        assert await asyncio.to_thread(mover.child.running.process.wait, 30) == 0

    run(act)


def test_a_mover_that_does_not_answer_is_killed():
    slot = memory_slot("parity", 0, PIECE)

    async def act(mover: Mover) -> None:
        writer = await new_writer(mover, slot)
        os.kill(pid_of(mover), signal.SIGSTOP)
        with pytest.raises(ChildGone, match="did not answer"):
            await writer.pull(RangePull(MoverAddress("127.0.0.1", 1, ""), bytes(32), at(7), 1, []), 0.2)
        await (await new_writer(mover, slot)).seal()

    run(act)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_movers_use_the_certificates_of_their_daemons(tmp_path):
    certificates = Certificates(tmp_path)
    files = [Path(each) for each in certificates.flags("ours", "node1")[1::2]]
    source, slot = section_source(1, PIECE, at(7)), memory_slot("parity", 0, PIECE)

    async def act(mover: Mover) -> None:
        writer = await new_writer(mover, slot)
        with pytest.raises(PullFailed, match="daemon of user alice on node node2 was called"):
            await pulled(mover, writer, [source], source, piece_ranges(PIECE, 0), name="node2")
        await pulled(mover, writer, [source], source, piece_ranges(PIECE, 0), name="node1")
        await writer.seal()
        assert slot.map.data[:PIECE].tobytes() == source.section
        _, port = await mover.grant("job", offered([source]))
        plain = socket.create_connection(("127.0.0.1", port), 5)
        with plain, contextlib.suppress(ConnectionResetError):
            plain.sendall(bytes(40))
            assert not plain.recv(1 << 10).startswith(bytes(4)), "a caller without a certificate is not admitted"

    run(act, MoverSettings(tls=Tls(*files)))


# Lanes that survive several lost members


@pytest.mark.parametrize(("D", "f"), [(3, 2), (4, 2), (5, 3), (6, 2), (7, 3)])
def test_the_parity_of_lanes_with_several_parities_is_that_of_the_drawing(D, f):
    noise = random.Random(f"{D} {f}")
    longest = (D - f) * 3 * CHUNK - 77
    sizes = [longest, *(noise.choice([1, 5000, longest // 2, longest]) for _ in range(D - 1))]
    [lane] = guard_lanes(sizes, range(D), CHUNK, f)
    assert lane.f == f and lane.blocks > 1
    sources = [section_source(rank, size, at(7)) for rank, size in enumerate(sizes)]
    slots = [SourceSlot(source.slot, *source.place, lane.piece_sizes) for source in sources]
    sections = [source.section for source in sources]

    async def fold_all(mover: Mover) -> None:
        sent = 0
        for holder in range(D):
            slot = memory_slot("parity", holder, lane.parity_bytes + CHUNK)  # an earlier lane had larger parity
            writer = await new_writer(mover, slot, lane.parity_bytes)
            for source in noise.sample(lane.sources_of(holder), D - 1):
                ticket, port = await mover.grant("job", slots)
                ranges = list(lane.requests(source, holder, CHUNK))
                cut = noise.randrange(len(ranges) + 1)
                for batch in (ranges[:cut], ranges[cut:]):  # a connection that ended, and another one
                    ticket, port = await mover.grant("job", slots)
                    fold = (lane.code.k, f), lane.column_of(source, holder), lane.block_bytes
                    address = MoverAddress("127.0.0.1", port, "localhost")
                    await writer.pull(RangePull(address, ticket, at(7), source, batch, *fold), 30)
                sent += sum(length for *_, length in ranges)
            await writer.seal()
            assert slot.map.data[: lane.parity_bytes].tobytes() == expected_parities(lane, sections, holder)
        assert mover.child.moved_bytes == sent == sum(lane.sent_bytes(source) for source in range(D))

    run(fold_all)
