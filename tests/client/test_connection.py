"""The control connection: against a real broker for what works, against a scripted peer for what no
broker would send."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import (
    BrokerError,
    BrokerUnavailableError,
    ClosedError,
    KdirectError,
    ProtocolError,
    TimedOutError,
    UnknownTopicError,
)
from kdirect.format import protocol
from kdirect.wire.connection import READ_BUFFER_BYTES, Connection, broker_error
from tests.support import stop_process

METADATA = protocol.MetadataRequest


def metadata(names=None):
    topics = None if names is None else [METADATA.MetadataRequestTopic(name=n) for n in names]
    return METADATA(topics=topics, allow_auto_topic_creation=False)


def frame(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


def versions_answer(correlation_id: int, ranges: dict[int, tuple[int, int]]) -> bytes:
    """An ApiVersions response, version 0."""
    body = b"".join(struct.pack(">hhh", key, low, high) for key, (low, high) in ranges.items())
    return frame(struct.pack(">ihi", correlation_id, 0, len(ranges)) + body)


class Peer:
    """Accepts connections; `script(socket, correlation id, api key, number of the request)` says
    what each request gets.

    It answers ApiVersions in version 0 only, as a broker of Kafka 0.10 does, unless `versions` is
    None.
    """

    RANGES = {0: (0, 8), 1: (0, 11), 3: (0, 8), 18: (0, 0)}

    def __init__(
        self, script: Callable[[socket.socket, int, int, int], None], versions: dict | None = RANGES
    ) -> None:
        self.script, self.versions = script, versions
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                s = self.listener.accept()[0]
            except OSError:
                return
            self.sockets.append(s)
            threading.Thread(target=self._serve, args=(s,), daemon=True).start()

    def _serve(self, s: socket.socket) -> None:
        data, count = b"", 0
        try:
            while True:
                while len(data) < 4 or len(data) < 4 + struct.unpack_from(">i", data)[0]:
                    piece = s.recv(65536)
                    if not piece:
                        return
                    data += piece
                size = struct.unpack_from(">i", data)[0]
                key, version, correlation_id = struct.unpack_from(">hhi", data, 4)
                data = data[4 + size :]
                if key == 18 and self.versions is not None:
                    unsupported = frame(struct.pack(">ihi", correlation_id, 35, 0))
                    s.sendall(
                        unsupported if version else versions_answer(correlation_id, self.versions)
                    )
                else:
                    self.script(s, correlation_id, key, count)
                    count += 1
        except OSError:
            pass

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.listener.close()
        for s in self.sockets:
            s.close()


@pytest.fixture
def peer():
    """Makes scripted peers and closes them."""
    made = []

    def make(script, **kwargs):
        made.append(Peer(script, **kwargs))
        return made[-1]

    yield make
    for p in made:
        p.close()


def connect(p: Peer, timeout_ms: float = 5000, **kwargs) -> Connection:
    return Connection("127.0.0.1", p.port, "test", timeout_ms, **kwargs)


def metadata_v8(correlation_id: int, cluster_id: str = "c") -> bytes:
    """An empty metadata response of version 8, framed."""
    return frame(
        struct.pack(">iiih", correlation_id, 0, 0, len(cluster_id))
        + cluster_id.encode()
        + struct.pack(">iii", 1, 0, -(2**31))
    )


# -- malformed and missing answers -----------------------------------------------------------------


def test_versions_fall_back_to_zero_and_agree(peer):
    p = peer(lambda s, c, key, n: s.sendall(metadata_v8(c, "a cluster")))
    with connect(p) as c:
        assert c.version_for(METADATA) == 8
        assert c.supports(3) and not c.supports(32001) and not c.is_kdirect
        assert c.request(metadata()).cluster_id == "a cluster"
        with pytest.raises(
            ProtocolError, match=r"does not know GetConsumeAccessRequest.*32003"
        ) as caught:
            c.request(protocol.GetConsumeAccessRequest(connection_id=1, partitions=[]))
        assert "kdirect broker" in caught.value.hint


def test_no_version_in_common(peer):
    with (
        connect(peer(lambda *a: None, versions={**Peer.RANGES, 0: (0, 2)})) as c,
        pytest.raises(
            ProtocolError, match=r"speaks versions 0 to 2 of ProduceRequest.*this client 3 to"
        ),
    ):
        c.version_for(protocol.ProduceRequest)


def test_wrong_correlation_id_ends_the_connection(peer):
    with connect(peer(lambda s, c, key, n: s.sendall(metadata_v8(c + 1)))) as c:
        with pytest.raises(
            ProtocolError, match=r"answered MetadataRequest with correlation id 4 instead of 3"
        ):
            c.request(metadata())
        assert c.closed
        with pytest.raises(ProtocolError):
            c.request(metadata())


def test_an_answer_nobody_asked_for(peer):
    with connect(peer(lambda s, c, key, n: s.sendall(metadata_v8(c) + metadata_v8(c + 7)))) as c:
        c.request(metadata())
        deadline = time.monotonic() + 5
        while c.alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(ProtocolError, match="nobody asked for"):
            c.request(metadata())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "speaks HTTP"),
        (b"\x15\x03\x03\x00\x02\x02\x46", "speaks TLS"),
        (b"\x7f\xff\xff\xff1234", "a response of 2147483647 bytes"),
        (b"\xff\xff\xff\xff", "a response of -1 bytes"),
        (b"\x00\x00\x00\x03abc", "a response of 3 bytes"),
    ],
)
def test_garbage_instead_of_a_frame(peer, answer, message):
    p = peer(lambda s, c, key, n: s.sendall(answer), versions=None)
    with pytest.raises(ProtocolError, match=message) as caught:
        connect(p)
    assert f"127.0.0.1:{p.port}" in str(caught.value) and caught.value.hint


def test_a_response_over_the_limit_is_refused_before_it_is_read(peer):
    with (
        connect(
            peer(lambda s, c, key, n: s.sendall(struct.pack(">ii", 5000, c))),
            max_response_bytes=4096,
        ) as c,
        pytest.raises(ProtocolError, match="5000 bytes; from 4 to 4096"),
    ):
        c.request(metadata())


@given(body=st.binary(max_size=200))
def test_any_body_is_a_response_or_a_protocol_error(body):
    """One connection an example: a malformed answer ends it."""
    p = Peer(lambda s, c, key, n: s.sendall(frame(struct.pack(">i", c) + body)))
    try:
        with connect(p) as c:
            try:
                c.request(metadata())
            except ProtocolError as e:
                assert "127.0.0.1" in str(e)
                assert c.closed
    finally:
        p.close()


def test_a_truncated_body_is_told_with_its_field(peer):
    with (
        connect(peer(lambda s, c, key, n: s.sendall(frame(metadata_v8(c)[4:-9])))) as c,
        pytest.raises(
            ProtocolError,
            match=r"malformed answer to MetadataRequest: .*controller_id, at byte 15 of 18",
        ),
    ):
        c.request(metadata())


def test_answers_in_pieces_and_several_in_one(peer):
    held = []

    def script(s, c, key, n):
        if n == 0:
            for i in range(len(answer := metadata_v8(c, "pieces"))):
                s.sendall(answer[i : i + 1])
        elif n < 3:
            held.append(metadata_v8(c, f"held {n}"))
        else:
            s.sendall(b"".join(held) + metadata_v8(c, "x" * 30000) * 1)

    with connect(peer(script)) as c:
        assert c.request(metadata()).cluster_id == "pieces"
        pending = [c.submit(metadata()) for _ in range(3)]
        assert [p.result().cluster_id for p in pending] == ["held 1", "held 2", "x" * 30000]
        assert pending[0].result().cluster_id == "held 1"


def test_frames_larger_than_the_buffer(peer):
    """Bodies around the size of the read buffer, each followed by a small one in the same bytes."""
    sizes = [READ_BUFFER_BYTES + d for d in (-70, -40, -5, -1, 0, 1, 5)] + [3 * READ_BUFFER_BYTES]

    def padded(c, size):
        # What follows the body is ignored, as Kafka does.
        return frame(metadata_v8(c)[4:] + bytes(size))

    with connect(
        peer(
            lambda s, c, key, n: (
                s.sendall(padded(c, sizes[n // 2]))
                if n % 2 == 0
                else s.sendall(metadata_v8(c, "small"))
            )
        )
    ) as c:
        for _ in sizes:
            big, small = c.submit(metadata()), c.submit(metadata())
            assert big.result().cluster_id == "c"
            assert small.result().cluster_id == "small"


def test_timeout_names_request_and_broker_and_the_late_answer_is_dropped(peer):
    release = threading.Event()

    def script(s, c, key, n):
        if n == 0:
            release.wait(5)
        s.sendall(metadata_v8(c, f"answer {n}"))

    p = peer(script)
    with connect(p) as c:
        with pytest.raises(
            TimedOutError, match=rf"127.0.0.1:{p.port} did not answer MetadataRequest within 50 ms"
        ):
            c.request(metadata(), timeout_ms=50)
        assert c.statistics()["abandoned"] == 1 and not c.closed
        release.set()
        assert c.request(metadata()).cluster_id == "answer 1"
        assert c.statistics() == {
            "requests": 4,
            "responses": 4,
            "bytes_sent": c.statistics()["bytes_sent"],
            "bytes_received": c.statistics()["bytes_received"],
            "in_flight": 0,
            "abandoned": 0,
        }


def test_waiting_with_patience_gives_nothing_up(peer):
    release = threading.Event()
    with connect(peer(lambda s, c, key, n: (release.wait(5), s.sendall(metadata_v8(c))))) as c:
        pending = c.submit(metadata())
        assert not pending.wait(20) and not pending.done
        release.set()
        assert pending.wait(5000) and pending.result().cluster_id == "c"


def test_a_peer_that_accepts_and_is_silent(peer):
    p = peer(lambda *a: None, versions=None)
    with pytest.raises(TimedOutError, match="accepts connections but does not answer"):
        connect(p, timeout_ms=80)


def test_a_peer_that_does_not_read_times_out_the_sender():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = time.monotonic()
        box = []

        def accept():
            s = listener.accept()[0]
            c = struct.unpack_from(">i", s.recv(4096), 8)[0]
            s.sendall(frame(struct.pack(">ihi", c, 35, 0)))
            c = struct.unpack_from(">i", s.recv(4096), 8)[0]
            s.sendall(versions_answer(c, Peer.RANGES))
            box.append(s)

        thread = threading.Thread(target=accept)
        thread.start()
        c = Connection("127.0.0.1", listener.getsockname()[1], "test", 5000)
        thread.join()
        r = protocol.ProduceRequest
        message = r(
            transactional_id=None,
            acks=1,
            timeout_ms=1,
            topic_data=[
                r.TopicProduceData(
                    name="t",
                    partition_data=[
                        r.TopicProduceData.PartitionProduceData(index=0, records=bytes(16 << 20))
                    ],
                )
            ],
        )
        with pytest.raises(TimedOutError, match="does not take requests"):
            c.submit(message, timeout_ms=150)
        assert c.closed  # half a frame cannot be taken back
        assert time.monotonic() - started < 5
        box[0].close()


def test_a_closed_first_connection_hints_at_the_listener(peer):
    with pytest.raises(
        BrokerUnavailableError, match="closed the connection at the first request"
    ) as caught:
        connect(peer(lambda s, *a: s.shutdown(socket.SHUT_RDWR), versions=None))
    assert "plaintext listener" in caught.value.hint


def test_the_broker_closes_while_requests_wait(peer):
    def script(s, c, key, n):
        if n == 2:
            s.shutdown(socket.SHUT_RDWR)

    p = peer(script)
    with connect(p) as c:
        errors = []

        def ask():
            try:
                c.request(metadata())
            except KdirectError as e:
                errors.append(e)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(5)
        assert len(errors) == 3 and len(set(map(id, errors))) == 3
        assert {type(e) for e in errors} == {BrokerUnavailableError}
        assert all(f"127.0.0.1:{p.port}" in str(e) and e.retriable for e in errors)
        assert c.closed and not c.alive()


@pytest.mark.parametrize(
    ("host", "message"),
    [("127.0.0.1", "connection refused"), ("no-such-host.invalid", "cannot be resolved")],
)
def test_nobody_there(host, message):
    with socket.socket() as s:  # bound, not listening: nobody else takes the port
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        with pytest.raises(BrokerUnavailableError, match=message) as caught:
            Connection(host, port, "test", 2000)
    assert f"{host}:{port}" in caught.value.message and "bootstrap.servers" in caught.value.hint


def test_closing_wakes_those_who_wait(peer):
    with connect(peer(lambda *a: None)) as c:
        pending = c.submit(metadata())
        errors = []

        def wait():
            try:
                pending.result()
            except KdirectError as e:
                errors.append(e)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        c.close()
        c.close()
        thread.join(5)
        assert [type(e) for e in errors] == [ClosedError]
        with pytest.raises(ClosedError):
            c.request(metadata())


def test_threads_share_one_connection_and_get_their_own_answers(peer):
    """The peer answers each request with what it asked for."""

    def script(s, c, key, n):
        s.sendall(metadata_v8(c, f"{c}"))

    with connect(peer(script)) as c:
        wrong = []

        def ask():
            for _ in range(200):
                pending = c.submit(metadata())
                if pending.result().cluster_id != str(pending.correlation_id):
                    wrong.append(pending)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        assert not wrong and c.statistics()["responses"] == 2 + 6 * 200


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a fork; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_is_refused_and_disturbs_nothing(peer):
    with connect(peer(lambda s, c, key, n: s.sendall(metadata_v8(c)))) as c:
        c.request(metadata())

        def child():
            assert c.closed
            for call in (lambda: c.request(metadata()), lambda: c.submit(metadata()), c.poll):
                with pytest.raises(ClosedError, match="belongs to process"):
                    call()
            c.close()  # the child's copy of the descriptor only

        assert in_child(child) == 0
        assert c.request(metadata()).cluster_id == "c"


def test_kafkas_error_codes_become_one_error_each():
    e = broker_error(6, "partition t-0")
    assert isinstance(e, BrokerError) and (e.code, e.name, e.retriable) == (
        6,
        "NOT_LEADER_OR_FOLLOWER",
        True,
    )
    e = broker_error(36, "creating topic 't'", "Topic 't' already exists.")
    assert str(e) == (
        "creating topic 't': Topic 't' already exists. (TOPIC_ALREADY_EXISTS);"
        " choose another name, or ask for if_not_exists"
    )
    assert not e.retriable
    assert isinstance(broker_error(3, "t-9"), UnknownTopicError)
    e = broker_error(12345, "x")
    assert (e.code, e.name, e.retriable) == (12345, "ERROR_12345", False)


# -- a real broker ---------------------------------------------------------------------------------


def host_port(servers: str) -> tuple[str, int]:
    host, _, port = servers.rpartition(":")
    return host, int(port)


def test_a_real_broker_is_known_as_kdirect(broker):
    with Connection(*host_port(broker.bootstrap_servers), "test", 10000) as c:
        assert c.is_kdirect and all(c.supports(key) for key in range(32001, 32005))
        response = c.request(metadata())
        assert [(b.host, b.port) for b in response.brokers] == [host_port(broker.bootstrap_servers)]
        assert c.alive()


def test_every_api_of_the_broker_has_a_version_in_common(broker):
    with Connection(*host_port(broker.bootstrap_servers), "test", 10000) as c:
        for message in (
            METADATA,
            protocol.ProduceRequest,
            protocol.FetchRequest,
            protocol.ListOffsetsRequest,
            protocol.CreateTopicsRequest,
            protocol.DeleteTopicsRequest,
            protocol.CreatePartitionsRequest,
            protocol.DescribeConfigsRequest,
            protocol.IncrementalAlterConfigsRequest,
            protocol.OffsetCommitRequest,
            protocol.OffsetFetchRequest,
            protocol.FindCoordinatorRequest,
            protocol.ListGroupsRequest,
            protocol.DeleteRecordsRequest,
        ):
            assert c.version_for(message) >= 0


def test_a_broker_killed_in_mid_request(broker_process):
    b = broker_process()
    with Connection(*host_port(b.bootstrap_servers), "test", 10000) as c:
        c.request(metadata())
        stop_process(b.pid)
        pending = c.submit(metadata())
        assert not pending.wait(50)
        os.kill(b.pid, signal.SIGKILL)
        with pytest.raises(BrokerUnavailableError, match="closed the connection"):
            pending.result()
        assert c.closed


def test_a_stopped_broker_times_out_and_goes_on(broker_process):
    b = broker_process()
    with Connection(*host_port(b.bootstrap_servers), "test", 10000) as c:
        stop_process(b.pid)
        try:
            with pytest.raises(TimedOutError, match="MetadataRequest within 100 ms"):
                c.request(metadata(), timeout_ms=100)
        finally:
            os.kill(b.pid, signal.SIGCONT)
        assert c.request(metadata()).brokers
