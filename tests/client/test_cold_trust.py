"""To which store a client's credentials may go, and what a broker that is not what it says can make
a client do: nothing but to refuse, and, with cold.reads=auto, to read through it."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.client.cold_places import Wanted, _views
from kdirect.client.cold_stores import ColdStores
from kdirect.client.cold_trust import trusted_uri
from kdirect.errors import ConfigError, ProtocolError, RemoteAccessError
from kdirect.format import protocol as p
from kdirect.options import CLIENT
from kdirect.wire.environment import SYSTEM
from tests.client.cold_logs import TP, ColdLog, cold_log
from tests.client.test_locations import located

SECRET = "the-secret-of-this-client"
KEYS = {"access_key": "id-of-this-client", "secret_key": SECRET}
AWS = "s3://tiers/prod?region=eu-central-1"
MINIO = "s3://tiers/prod?endpoint_override=minio:9000"


@pytest.mark.parametrize(
    ("broker", "own", "config"),
    [
        (AWS, AWS, KEYS),
        (AWS, "s3://tiers/prod", KEYS),  # the client's region is its own matter
        (MINIO, MINIO, KEYS),
        (MINIO, MINIO + "&scheme=http", {}),
        (AWS, None, {}),
        ("gs://tiers/prod", None, {}),
        ("abfs://tiers@account.dfs.core.windows.net/prod", None, {}),
        ("file:///tiers", None, {}),
        (MINIO + "&anonymous=true", None, {}),
        (MINIO, None, {"anonymous": "true"}),
    ],
)
def test_stores_that_are_trusted(broker: str, own: str | None, config: dict[str, str]) -> None:
    assert trusted_uri(broker, own, config) == (broker if own is None else own)


@pytest.mark.parametrize(
    ("broker", "own", "config"),
    [
        (MINIO, AWS, KEYS),  # another endpoint
        (AWS, MINIO, KEYS),
        ("s3://tiers/other", "s3://tiers/prod", KEYS),
        ("s3://tiers", "s3://tiers/prod", KEYS),
        ("s3://others/prod", "s3://tiers/prod", KEYS),
        ("gs://tiers/prod", "s3://tiers/prod", KEYS),
        ("file:///etc", "s3://tiers/prod", {}),
        ("https://attacker", "s3://tiers/prod", {}),
        (AWS, None, KEYS),  # nobody says where the keys are to go
        (MINIO, None, {}),  # the environment's
        ("s3://tiers?scheme=http", None, {}),
        ("s3://tiers?tls_ca_file_path=/tmp/ca", None, {}),
        ("gs://tiers?endpoint_override=attacker:443", None, {}),
        ("abfs://tiers@attacker.example/prod", None, {}),
        ("abfs://tiers@core.windows.net.attacker.example/prod", None, {}),
        ("abfs://c@a.dfs.core.windows.net/p?blob_storage_authority=attacker", None, {}),
        ("hdfs://attacker:8020/tiers", None, {}),
    ],
)
def test_stores_that_are_not(broker: str, own: str | None, config: dict[str, str]) -> None:
    with pytest.raises((RemoteAccessError, ConfigError)) as e:
        trusted_uri(broker, own, config)
    assert SECRET not in str(e.value)
    if isinstance(e.value, RemoteAccessError):
        assert e.value.hint


def test_an_option_with_credentials_in_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"remote\.storage\.uri holds credentials") as e:
        CLIENT.resolve({"bootstrap.servers": "x:1", "remote.storage.uri": f"s3://a:{SECRET}@b/c"})
    assert SECRET not in str(e.value)


def changed(log: ColdLog, **fields: Any) -> Any:
    """The real answer, with other fields in its first location."""
    answer = located(log, 0)
    for name, value in fields.items():
        place = answer if name in ("store_uri", "cluster_id") else answer.partitions[0].locations[0]
        setattr(place, name, value)
    return answer


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory, object_stores: Any) -> Any:
    with cold_log(tmp_path_factory.mktemp("t"), object_stores["s3"].fresh(), records=400) as found:
        yield found


def forgeries(log: ColdLog) -> list[dict[str, Any]]:
    first, second = log.segments[:2]
    key, other = log.key(first), log.key(second)
    return [
        {"key": "../../etc/passwd"},
        {"key": f"/{key}"},
        {"key": f"../{key}"},
        {"key": key.replace("cold-", "secrets-")},
        {"key": key.replace("/0/", "/1/")},
        {"key": None},
        {"key": other},
        {"base_offset": 3},
        {"end_offset": 0},
        {"log_bytes": 1 << 40},
        {"log_bytes": 5},
        {"tail_position": 17},
        {"tail_length": -1},
        {"tail_length": 1 << 40},
        {"leader_epochs": []},
        {"cluster_id": "another"},
        {"store_uri": None},
        {"url": "file:///etc/passwd"},
        {"url": f"http://169.254.169.254/latest/{other}"},
        {"url": "http://[::1"},
        {"url": f"ftp://host/{key}"},
    ]


def test_locations_that_cannot_be(log: ColdLog) -> None:
    wanted = [Wanted(TP, 0, -1)]
    assert _views(wanted, changed(log))[TP].places
    for fields in forgeries(log):
        with pytest.raises(ProtocolError, match="the broker located records of cold-0") as e:
            _views(wanted, changed(log, **fields))
        assert "169.254" not in str(e.value) and "passwd" not in str(e.value), fields
    empty = p.LocateRecordsResponse(cluster_id="x", store_uri=None, partitions=[])
    with pytest.raises(ProtocolError, match="located 0 of 1"):
        _views(wanted, empty)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_broker_that_names_another_store(
    tmp_path: Path, log: ColdLog, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets no request with the client's credentials."""
    settings = log.settings(transport=transport)
    attacker = log.place.within(endpoint="127.0.0.1:9").uri
    locations = log.broker.server.remote.locations
    locations._store = log.place.within(endpoint="127.0.0.1:9").store()
    try:
        with (
            kdirect.connect(settings | {"cold.reads": "direct"}) as session,
            session.reader(TP, 0, log.records) as reader,
            pytest.raises(RemoteAccessError, match=r"remote\.storage\.uri is"),
        ):
            list(reader)
        with kdirect.connect(settings) as session, session.reader(TP, 0, log.records) as reader:
            assert sum(b.num_rows for b in reader) == log.records
        (warning,) = [r for r in caplog.records if "read through the broker" in r.getMessage()]
        assert warning.levelno == logging.WARNING and attacker in warning.getMessage()
    finally:
        locations._store = log.broker.server.remote.store
    assert log.place.config["secret_key"] not in caplog.text


@pytest.mark.parametrize("mode", ["auto", "direct"])
def test_a_broker_that_forges_locations(log: ColdLog, mode: str, monkeypatch: Any) -> None:
    from kdirect.broker import remote_locations

    monkeypatch.setattr(remote_locations, "key_of", lambda *_: "../../etc/passwd")
    settings = log.settings(transport="tcp", cold_reads=mode)
    with kdirect.connect(settings) as session, session.reader(TP, 0, log.records) as reader:
        if mode == "direct":
            with pytest.raises(ProtocolError, match="no key of a segment"):
                list(reader)
        else:
            assert sum(b.num_rows for b in reader) == log.records


def test_a_signed_url_is_nowhere(tmp_path: Path, object_stores: Any) -> None:
    with cold_log(tmp_path, object_stores["s3"].fresh(), "presigned", records=300) as log:
        (view,) = _views([Wanted(TP, 0, -1)], located(log, 0)).values()
        (place, *_) = view.places
        assert place.url is not None and "Signature" in place.url
        assert "Signature" not in repr(view) + str(place)
        assert b"Signature" not in pickle.dumps(place)
        assert pickle.loads(pickle.dumps(place)) == replace(place, url=None)
        settings = CLIENT.resolve({"bootstrap.servers": log.servers})
        stores = ColdStores(settings, SYSTEM)
        assert "Signature" not in stores.name(place) + repr(stores)
        log.place.store().delete(place.key)
        with pytest.raises(kdirect.KdirectError) as e:
            stores.get(place, 0, 10)
        assert place.key in str(e.value) and "Signature" not in str(e.value)
