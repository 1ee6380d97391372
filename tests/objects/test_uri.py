"""What URIs and properties of object stores are refused, and that no credential is repeated."""

from __future__ import annotations

import pickle

import pytest

from kdirect.errors import ConfigError
from kdirect.objects.uri import parse

SECRET = "s3cr3t-5f2b"


@pytest.mark.parametrize(
    ("uri", "root", "bucket"),
    [
        ("s3://bucket", "bucket", "bucket"),
        ("s3://bucket/a/b/", "bucket/a/b", "bucket"),
        ("s3://bucket//a?region=eu-west-1", "bucket/a", "bucket"),
        ("gs://bucket/a", "bucket/a", "bucket"),
        ("gcs://bucket/a%20b", "bucket/a b", "bucket"),
        ("abfs://box@account.dfs.core.windows.net/a", "box/a", "box"),
        ("hdfs://user@name:8020/a/b", "/a/b", ""),
        ("file:///var/tiers/", "/var/tiers", ""),
        ("file:///", "/", ""),
    ],
)
def test_a_uri_has_a_root(uri: str, root: str, bucket: str) -> None:
    parsed = parse(uri, {})
    assert (parsed.root, parsed.bucket) == (root, bucket)
    assert parse(parsed.text, {}) == parsed


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("", "no scheme"),
        ("/var/tiers", "no scheme"),
        ("http://bucket/a", "'http'"),
        ("s4://bucket/a", "'s4'"),
        ("s3://", "names no bucket"),
        ("s3:///a", "names no bucket"),
        ("gs://", "names no bucket"),
        ("hdfs:///a", "names no host"),
        ("file://host/a", "root of the file system"),
        ("file:a", "root of the file system"),
        ("s3://bucket/../other", "'..'"),
        ("s3://bucket/a#b", "'#'"),
        ("s3://bucket/a?regoin=x", "regoin"),
        ("s3://[bucket/a", "malformed"),
        ("s3://bucket?scheme=ftp", "neither http nor https"),
        ("s3://bucket?anonymous=maybe", "neither true nor false"),
    ],
)
def test_a_wrong_uri_is_named(uri: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(uri, {})
    assert says in caught.value.message


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://key:{SECRET}@bucket/a",
        f"s3://{SECRET}@bucket/a",
        f"gs://user:{SECRET}@bucket",
        f"abfs://account:{SECRET}@box/a",
        f"hdfs://user:{SECRET}@name:8020/a",
        f"s3://bucket/a?secret_key={SECRET}",
        f"s3://bucket/a?access_key=x&session_token={SECRET}",
        f"abfs://box@account/a?sas_token={SECRET}",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(uri, {})
    error = caught.value
    assert SECRET not in f"{error} {error!r} {error.__cause__!r} {pickle.dumps(error)!r}"
    assert "docs/object-stores.md" in error.hint


def test_properties() -> None:
    config = {"access_key": "AKIA", "secret_key": SECRET, "region": "eu-west-1"}
    parsed = parse("s3://bucket/a?region=us-east-1", config)
    assert parsed.settings == {"region": "eu-west-1"}  # the property counts
    assert parsed.secrets == {"access_key": "AKIA", "secret_key": SECRET}
    assert SECRET not in f"{parsed!r} {parsed}"


@pytest.mark.parametrize(
    ("config", "says", "hint"),
    [
        ({"secret": SECRET}, "'secret'", "secret_key"),
        ({"access_keys": SECRET}, "access_keys", "access_key"),
        ({"access_key": SECRET}, "secret_key", "or neither"),
        ({"secret_key": SECRET}, "access_key", "or neither"),
        ({"session_token": SECRET}, "access_key and secret_key", "or neither"),
    ],
)
def test_a_wrong_property_is_named(config: dict[str, str], says: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("s3://bucket/a", config)
    assert says in caught.value.message and hint in caught.value.hint
    assert SECRET not in str(caught.value)
