"""Two that think that the objects of a cluster are theirs: copies of log directories, and a cluster
id that was given twice.  What only one of them knows is never deleted by the other."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdirect.broker.remote_metadata import RemoteMetadataTable
from kdirect.errors import ClosedError, KdirectError, NotOwnerError, RemoteUnavailableError
from kdirect.format.ids import encode_id
from kdirect.format.remote_metadata import (
    PartitionDeleteState,
    RemotePartitionDelete,
    RemoteSegment,
    SegmentState,
)
from kdirect.log import checkpoint
from kdirect.log.clock import now_ms
from kdirect.member import remote_owner
from kdirect.member.loop_store import LoopStore
from kdirect.storage import ownership, remote_logs
from kdirect.storage.ownership import FileKeeper, Ownership, markers
from kdirect.store.contract import Create
from kdirect.store.sim import SimServer, SimStore
from tests.object_servers import Place, gate_to
from tests.storage.test_remote_tools import credentials, rebuild, run
from tests.storage.tiered_broker import TieredBroker, tiered_broker
from tests.support import wait_until

RECORDS = 1000
WAIT_S = 30.0
PATIENT_S = 3.0  # in which a broker that may sweeps several times


@pytest.fixture(params=["directory", "s3"])
def place(request: Any, object_stores: Any) -> Place:
    found: Place = object_stores[request.param].fresh()
    return found


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who owns the objects is looked at before each copy."""
    for name in ("OWNER_COPIES_S", "OWNER_DELETES_S"):
        monkeypatch.setattr(remote_logs, name, 0.0)
    monkeypatch.setattr(ownership, "LOST_FOR_S", 0.2)


def filled(place: Place, log_dir: Path) -> None:
    with tiered_broker(place, log_dir) as tiers:
        tiers.create()
        tiers.produce(0, RECORDS)
        tiers.settle()


def everything(tiers: TieredBroker, records: int) -> bool:
    return tiers.consume(0, records) == [(i, i) for i in range(records)]


@contextlib.contextmanager
def both(
    place: Place, owner_dir: Path, other_dir: Path, **of_other: Any
) -> Iterator[tuple[TieredBroker, TieredBroker]]:
    """Two brokers that delete what they may at once; the other one starts last."""
    with (
        tiered_broker(place, owner_dir, remote_orphan_age_ms=1) as owner,
        tiered_broker(place, other_dir, remote_orphan_age_ms=1, **of_other) as other,
    ):
        yield owner, other


def test_a_copy_of_the_directory_takes_nothing(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(place, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with tiered_broker(place, tmp_path / "a", remote_orphan_age_ms=1) as a:
        a.wait(lambda: len(owners(place, a)) == 1 and a.address in owner_of(place, a))
        with tiered_broker(place, tmp_path / "b", remote_orphan_age_ms=1) as b:
            b.wait(lambda: b.figure("remote_not_owner") == 1)
            objects = b.objects()
            for tiers in (a, b):
                tiers.produce(RECORDS, RECORDS)
            a.settle()
            time.sleep(PATIENT_S)
            assert set(objects) < set(b.objects())
            assert len(b.objects()) == a.figure("remote_metadata_count"), "of the owner alone"
            assert b.figure("remote_copy_lag_segments") > 0 and not a.figure("remote_not_owner")
            assert a.figure("remote_orphans") == b.figure("remote_orphans") == 0
            assert everything(a, 2 * RECORDS) and everything(b, 2 * RECORDS)
    told = [r.getMessage() for r in caplog.records if "belong to" in r.getMessage()]
    assert told and all(a.address in text and "take.over=" in text for text in told)


def test_a_copy_that_starts_while_the_first_one_runs(place: Place, tmp_path: Path) -> None:
    """It cannot be told from the same broker's next start, so it is the owner from then on; and the
    first one, which is told, loses nothing that it has."""
    filled(place, tmp_path / "a")
    with tiered_broker(place, tmp_path / "a", remote_orphan_age_ms=1) as a:
        a.wait(lambda: a.address in owner_of(place, a))
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        a.produce(RECORDS, RECORDS)
        a.settle()
        of_a = set(a.objects())
        with tiered_broker(place, tmp_path / "b", remote_orphan_age_ms=1) as b:
            b.wait(lambda: b.address in owner_of(place, b))
            b.produce(RECORDS, RECORDS)
            b.settle()
            a.produce(2 * RECORDS, RECORDS)
            a.wait(lambda: a.figure("remote_not_owner") == 1)
            time.sleep(PATIENT_S)
            assert of_a < set(a.objects())
            assert everything(a, 3 * RECORDS) and everything(b, 2 * RECORDS)


def test_one_cluster_id_that_was_given_twice(place: Place, tmp_path: Path) -> None:
    filled(place, tmp_path / "a")
    given = checkpoint.read_properties(tmp_path / "a" / "meta.properties")
    assert given is not None
    (tmp_path / "b").mkdir()
    checkpoint.write_properties(tmp_path / "b" / "meta.properties", given)
    with both(place, tmp_path / "a", tmp_path / "b") as (a, b):
        a.wait(lambda: a.address in owner_of(place, a))
        objects = a.objects()
        b.create()
        b.produce(0, RECORDS)
        b.wait(lambda: b.figure("remote_not_owner") == 1)
        time.sleep(PATIENT_S)
        assert a.objects() == objects
        assert everything(a, RECORDS) and everything(b, RECORDS)


def test_a_broker_may_be_told_to_take_over(place: Place, tmp_path: Path) -> None:
    filled(place, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with tiered_broker(place, tmp_path / "a") as a:
        a.wait(lambda: a.address in owner_of(place, a))
        (marker,) = owners(place, a)
        over = {"remote_log_storage_take_over": marker.incarnation}
        with tiered_broker(place, tmp_path / "b", **over) as b:
            b.produce(RECORDS, RECORDS)
            b.settle()
            assert not b.figure("remote_not_owner") and everything(b, 2 * RECORDS)
            a.produce(RECORDS, RECORDS)
            a.wait(lambda: a.figure("remote_not_owner") == 1)
    with tiered_broker(place, tmp_path / "b") as b:
        b.wait(lambda: b.address in owner_of(place, b), "it is the owner without being told again")


def test_rebuilding_takes_over(place: Place, tmp_path: Path, capsys: Any) -> None:
    filled(place, tmp_path / "a")
    with tiered_broker(place, tmp_path / "a") as a:
        a.wait(lambda: a.address in owner_of(place, a))
        assert rebuild(capsys, place, tmp_path / "b")[0] == 0
        a.produce(RECORDS, RECORDS)
        a.wait(lambda: a.figure("remote_not_owner") == 1)
        assert rebuild(capsys, place, tmp_path / "b")[0] == 2, "it is not empty"
        with tiered_broker(place, tmp_path / "b") as b:
            end = b.partition.log_end_offset
            b.produce(end, RECORDS)
            b.settle()
            assert everything(b, end + RECORDS)


def test_a_sweep_by_hand_asks_the_owner(place: Place, tmp_path: Path, capsys: Any) -> None:
    filled(place, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with tiered_broker(place, tmp_path / "a") as a:
        a.wait(lambda: a.address in owner_of(place, a))
        a.produce(RECORDS, RECORDS)
        a.settle()
        objects = a.objects()
        with tiered_broker(place, tmp_path / "b") as b:
            sweep = ["remote", "sweep", "--broker", b.address, *credentials(place)]
            sweep += ["--age-ms", "-1000"]
            status, _, said = run(capsys, *sweep)
            assert status != 0 and a.address in said and b.objects() == objects
            (marker,) = owners(place, a)
            status, rows, _ = run(capsys, *sweep, "--owner", marker.incarnation)
            assert (
                status == 0
                and rows
                and set(b.objects()) == set(objects) - {row["key"] for row in rows}
            )


def test_a_broker_that_does_not_start_takes_nothing(object_stores: Any, tmp_path: Path) -> None:
    place = object_stores["directory"].fresh()
    filled(place, tmp_path / "a")
    with tiered_broker(place, tmp_path / "a") as a, socket.socket() as taken:
        a.wait(lambda: a.address in owner_of(place, a))
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        listeners = f"PLAINTEXT://127.0.0.1:{port}"
        with (
            pytest.raises((KdirectError, OSError)),
            tiered_broker(place, tmp_path / "b", listeners=listeners),
        ):
            pass
        assert a.address in owner_of(place, a)


# -- what turns up late ----------------------------------------------------------------------------


def test_what_a_given_up_copy_stored_after_all_is_deleted(
    object_stores: Any, tmp_path: Path
) -> None:
    """Also after a restart: the metadata remembers the try."""
    with gate_to(object_stores["s3"].fresh()) as (gate, place):
        with tiered_broker(place, tmp_path / "log") as tiers:
            refused: list[str] = []

            def refuse_once(request: Any) -> Any:
                if request.method == "PUT" and request.path.endswith(".kseg") and not refused:
                    refused.append(request.path)
                    return (400, "InvalidRequest")
                return None

            gate.fault = refuse_once
            tiers.create()
            tiers.produce(0, RECORDS)
            tiers.settle()
            objects = tiers.objects()
            key = refused[0].partition(place.uri.partition("?")[0].rpartition("/")[2] + "/")[2]
            assert key.endswith(".kseg") and key not in objects
        place.store().put(key, 4, [b"late"])
        unknown = key[:-10] + "AAAAA.kseg"
        place.store().put(unknown, 4, [b"more"])
        with tiered_broker(place, tmp_path / "log", remote_orphan_age_ms=1) as tiers:
            tiers.wait(lambda: key not in tiers.objects(), "it is swept")
            assert tiers.objects() == sorted([*objects, unknown])
            tiers.wait(lambda: tiers.figure("remote_orphans") == 1)  # counted after it went


def test_a_partition_whose_end_is_told_twice_is_remembered_once() -> None:
    """By a leader whose first word seemed to be lost; and one that led before comes late."""
    table = RemoteMetadataTable(3_600_000)
    where: dict[str, Any] = {"topic": "t", "topic_id": uuid.uuid4(), "partition": 0, "broker_id": 1}
    where["event_timestamp_ms"] = now_ms()

    def begun() -> RemoteSegment:
        return RemoteSegment(
            **where,
            segment_id=uuid.uuid4(),
            base_offset=0,
            end_offset=1,
            max_timestamp_ms=0,
            leader_epochs=((0, 0),),
            size=1,
            custom=None,
            state=SegmentState.COPY_SEGMENT_STARTED,
        )

    finished = PartitionDeleteState.DELETE_PARTITION_FINISHED
    given_up = begun()
    for record in (given_up, *2 * [RemotePartitionDelete(**where, state=finished)], begun()):
        table.take(record)
    found = [segment.segment_id for segment in table.given_up(lambda key: True)]
    assert found == [given_up.segment_id] and not table.partitions


# -- the rules -------------------------------------------------------------------------------------


def owners(place: Place, tiers: TieredBroker) -> list[Any]:
    return markers(place.store(), f"{tiers.broker.server.logs.cluster_id}/owners/")


def owner_of(place: Place, tiers: TieredBroker) -> str:
    """Where the owner says that it is."""
    found = owners(place, tiers)
    return ownership.owner_address(place.store(), found[-1]) if found else ""


class Memory:
    def __init__(self, *incarnations: str) -> None:
        self.incarnations = list(incarnations)
        self.full = False

    def knows(self, incarnation: str) -> bool:
        return incarnation in self.incarnations

    def remember(self, incarnations: Any) -> None:
        if self.full:
            raise OSError("no space left on device")
        self.incarnations += incarnations


def owner(store: Any, keeper: Any, **options: Any) -> Ownership:
    found = Ownership(store, "c", keeper, address=lambda: "here:1", **options)
    found.serve()
    return found


def test_the_next_start_is_the_owner_whatever_a_crash_left(object_stores: Any) -> None:
    store = object_stores["directory"].fresh().store()
    keeper = Memory()
    owner(store, keeper).require(0)
    begun = owner(store, keeper)
    put, store.put = store.put, lambda *a, **k: (_ for _ in ()).throw(RemoteUnavailableError("no"))
    with pytest.raises(RemoteUnavailableError):
        begun.require(0)  # its incarnation is kept, and its marker was not put
    store.put = put
    owner(store, keeper).require(0)
    begun.require(0)
    keeper.full = True
    with pytest.raises(OSError, match="no space"):
        owner(store, keeper).require(0)
    assert len(markers(store, "c/owners/")) == 1


def test_an_incarnation_can_be_given_on_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [uuid.UUID(bytes=b"\xfb" * 16), uuid.UUID(int=7)]  # the first one's text begins with -
    monkeypatch.setattr(ownership.uuid, "uuid4", lambda: given.pop(0))
    assert ownership._new_incarnation() == encode_id(uuid.UUID(int=7))


def test_of_two_that_begin_at_once_one_is_the_owner(object_stores: Any) -> None:
    store = object_stores["directory"].fresh().store()
    first, second = owner(store, Memory()), owner(store, Memory())
    mine = second._put(1)
    theirs = first._put(1)
    for each, marker in ((second, mine), (first, theirs)):
        each._keeper.remember([marker.incarnation])
    outcomes = []
    for each in (first, second):
        try:
            each.require(0)
            outcomes.append(True)
        except NotOwnerError:
            outcomes.append(False)
    assert sorted(outcomes) == [False, True]


def test_who_lost_looks_again(object_stores: Any) -> None:
    store = object_stores["directory"].fresh().store()
    mine, other = owner(store, Memory()), owner(store, Memory("x"))
    mine.require(0)
    with pytest.raises(NotOwnerError, match="here:1"):
        other.require(0)
    assert other.is_lost
    for marker in markers(store, "c/owners/"):
        store.delete(marker.key)
    wait_until(lambda: _requires(other), "it looks again", 10)
    assert not other.is_lost
    mine.close()
    with pytest.raises(ClosedError):
        mine.require(1000)


def _requires(found: Ownership) -> bool:
    with contextlib.suppress(NotOwnerError):
        found.require(0)
        return True
    return False


def test_several_that_share_an_id_by_agreement(object_stores: Any) -> None:
    store = object_stores["directory"].fresh().store()
    alone, first, second = (owner(store, Memory(), scope=s) for s in ("", "1/", "2/"))
    for each in (alone, first, second, alone, first):
        each.require(0)


def test_who_begins_waits_for_nobody_that_looks(object_stores: Any) -> None:
    """The keeper of a cluster asks the event loop, on which a leadership begins."""
    store = object_stores["directory"].fresh().store()
    looks, go = threading.Event(), threading.Event()

    class Slow(Memory):
        def remember(self, incarnations: Any) -> None:
            looks.set()
            assert go.wait(WAIT_S)
            super().remember(incarnations)

    mine = owner(store, Slow(), begins=False)
    looking = threading.Thread(target=mine.require, args=(0,))
    looking.start()
    assert looks.wait(WAIT_S)
    threading.Thread(target=lambda: (mine.begin(), go.set()), daemon=True).start()
    assert go.wait(WAIT_S), "it began meanwhile"
    looking.join()
    before = markers(store, "c/owners/")
    mine.require(1000)
    (after,) = markers(store, "c/owners/")
    assert [marker.number for marker in before] == [1] and after.number == 2
    assert after.incarnation != before[0].incarnation


def test_starts_that_cannot_say_so_do_not_make_the_owner_a_stranger(
    object_stores: Any, tmp_path: Path
) -> None:
    """A store that refuses what is put, and a broker that is started again and again."""
    store = object_stores["directory"].fresh().store()
    owner(store, FileKeeper([tmp_path])).require(0)
    with contextlib.ExitStack() as refusing:
        refusing.callback(setattr, store, "put", store.put)
        store.put = lambda *a, **k: (_ for _ in ()).throw(RemoteUnavailableError("no"))
        for _ in range(2 * ownership.MOST_KEPT):
            with pytest.raises(RemoteUnavailableError):
                owner(store, FileKeeper([tmp_path])).require(0)
    owner(store, FileKeeper([tmp_path])).require(0)


def test_a_cluster_knows_its_present_owner_longest() -> None:
    async def all_of_them() -> list[str]:
        server = SimServer(1)
        store = LoopStore(SimStore(server), asyncio.get_running_loop())
        store.start(lambda event: None)

        async def answered(work: Any) -> Any:
            task = asyncio.ensure_future(work)
            while not task.done():
                server.step()
                await asyncio.sleep(0)
            return task.result()

        await answered(store.commit_later(Create("/kdirect", b"")))
        for number in range(2 * remote_owner.MOST):
            await answered(remote_owner.add_incarnations(store, ["owner", str(number)]))
        found: list[str] = await answered(remote_owner.read_incarnations(store))
        return found

    found = asyncio.run(all_of_them())
    assert len(found) == remote_owner.MOST
    assert found[-2:] == ["owner", str(2 * remote_owner.MOST - 1)]


def test_one_of_several_directories_is_enough(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    keeper = FileKeeper([tmp_path / "a", tmp_path / "b"])
    keeper.remember(["one"])
    (tmp_path / "a" / ownership.OWN_FILE).write_bytes(b"\xff{")
    assert keeper.knows("one") and not keeper.knows("two")
    shutil.rmtree(tmp_path / "b")
    keeper.remember(["two"])
    assert keeper.knows("two")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(OSError):
        keeper.remember(["three"])
