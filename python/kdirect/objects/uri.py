"""What the URI of an object store and its properties say.

Owns: the schemes, which parameters and properties each of them has, and which of these are secret.
Pure: it opens nothing.  A URI is shown to people and kept in metadata, so a credential in it is
refused, and no error repeats it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from kdirect.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One kind of store.  `parameters` may stand in the URI or among the properties; `secrets` are
    properties only.  `bucket`: what the URI's host is called."""

    name: str
    bucket: str
    parameters: frozenset[str] = frozenset()
    secrets: frozenset[str] = frozenset()
    user: bool = False  # whether user@host is no credential here


_S3 = Scheme(
    name="s3",
    bucket="bucket",
    parameters=frozenset(
        {
            "region",
            "endpoint_override",
            "scheme",
            "anonymous",
            "force_virtual_addressing",
            "tls_ca_file_path",
        }
    ),
    secrets=frozenset({"access_key", "secret_key", "session_token"}),
)
_GCS = Scheme(
    name="gs",
    bucket="bucket",
    parameters=frozenset({"endpoint_override", "scheme", "anonymous", "project_id"}),
)
_AZURE = Scheme(
    name="abfs",
    bucket="container",
    parameters=frozenset({"blob_storage_authority", "dfs_storage_authority"}),
    secrets=frozenset({"account_key", "sas_token"}),
    user=True,
)
_HDFS = Scheme(
    name="hdfs",
    bucket="host",
    parameters=frozenset({"replication", "user", "kerb_ticket"}),
    user=True,
)
_FILE = Scheme(name="file", bucket="")
SCHEMES: Mapping[str, Scheme] = {
    "s3": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "hdfs": _HDFS,
    "viewfs": _HDFS,
    "file": _FILE,
}
FORMS = "s3://bucket/prefix, gs://bucket/prefix, abfs://container@account…, hdfs://… or file:///…"
BOOLS = frozenset({"anonymous", "force_virtual_addressing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUri:
    """A parsed URI with its properties.  `text` has no credentials; `root` is the path of the
    prefix as pyarrow has it, and `bucket` the part of it that is never made."""

    scheme: Scheme
    text: str
    bucket: str
    root: str
    settings: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    written: str = ""  # the scheme as it was written: abfs or abfss


def parse(uri: str, properties: Mapping[str, str]) -> StoreUri:
    """ConfigError for a URI or a property that no store has."""
    try:
        parts = urlsplit(uri)
        user, password = parts.username, parts.password
    except ValueError as e:
        raise ConfigError("the URI of an object store is malformed", hint=f"write {FORMS}") from e
    scheme = SCHEMES.get(parts.scheme)
    if scheme is None:
        found = f"the scheme {parts.scheme!r}" if parts.scheme else "no scheme"
        raise ConfigError(f"the URI of an object store has {found}", hint=f"write {FORMS}")
    host = parts.netloc.rpartition("@")[2]
    if password is not None or (user is not None and not scheme.user):
        raise ConfigError(
            f"the URI {parts.scheme}://…@{host} has credentials in it, and URIs are shown",
            hint=_remedy(scheme),
        )
    if scheme.bucket and not parts.netloc:
        raise ConfigError(
            f"{parts.scheme}:// names no {scheme.bucket}",
            hint=f"write {parts.scheme}://{scheme.bucket}/prefix",
        )
    if not scheme.bucket and (parts.netloc or not parts.path.startswith("/")):
        raise ConfigError(
            f"file://{parts.netloc} does not begin at the root of the file system",
            hint="write file:///path/to/directory, with three slashes",
        )
    if parts.fragment:
        raise ConfigError(
            f"the URI {parts.scheme}://{host} has a '#'", hint="write it as %23, or do without"
        )
    settings, secrets = _settings(scheme, parts.query, properties)
    path = "/".join(p for p in unquote(parts.path).split("/") if p)
    if any(p in (".", "..") for p in path.split("/")):
        raise ConfigError(f"the path of {parts.scheme}://{host} has '.' or '..' in it")
    bucket, root = _places(scheme, parts.netloc, path)
    shown = quote(path, safe="/")
    text = f"{parts.scheme}://{parts.netloc}{'/' if shown or scheme is _FILE else ''}{shown}"
    if parts.query:
        text += f"?{parts.query}"
    return StoreUri(
        scheme=scheme,
        text=text,
        bucket=bucket,
        root=root,
        settings=settings,
        secrets=secrets,
        written=parts.scheme,
    )


def _places(scheme: Scheme, netloc: str, path: str) -> tuple[str, str]:
    if scheme is _FILE or scheme is _HDFS:
        return "", "/" + path
    bucket = netloc.partition("@")[0] if scheme is _AZURE else netloc
    return bucket, f"{bucket}/{path}" if path else bucket


def _settings(
    scheme: Scheme, query: str, properties: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    given = parse_qsl(query, keep_blank_values=True)
    for name, _ in given:
        if name in scheme.secrets:
            raise ConfigError(f"the URI has {name} in it, and URIs are shown", hint=_remedy(scheme))
        if name not in scheme.parameters:
            raise ConfigError(
                f"{scheme.name}:// has no parameter {name!r}",
                hint=_nearest(name, scheme.parameters),
            )
    known = scheme.parameters | scheme.secrets
    for name in properties:
        if name not in known:
            raise ConfigError(
                f"{scheme.name}:// has no property {name!r}", hint=_nearest(name, known)
            )
    settings = {**dict(given), **{n: v for n, v in properties.items() if n in scheme.parameters}}
    secrets = {n: v for n, v in properties.items() if n in scheme.secrets and v}
    for name in BOOLS & settings.keys():
        if settings[name].lower() not in ("true", "false"):
            raise ConfigError(f"{name} of {scheme.name}:// is neither true nor false")
    if scheme is _S3:
        if settings.get("scheme", "https") not in ("http", "https"):
            raise ConfigError("scheme of s3:// is neither http nor https")
        lacks = [n for n in ("access_key", "secret_key") if n not in secrets]
        if len(lacks) == 1 or (lacks and secrets):
            raise ConfigError(
                f"{' and '.join(lacks)} of s3:// is missing beside {', '.join(sorted(secrets))}",
                hint="set access_key and secret_key, or neither (then the environment decides)",
            )
    return settings, secrets


def _nearest(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(known)) or '-'}"


def _remedy(scheme: Scheme) -> str:
    names = ", ".join(f"rsm.config.{n}" for n in sorted(scheme.secrets))
    set_them = f"set {names}, or " if names else "leave them out, "
    return f"{set_them}use what the environment has (docs/object-stores.md)"
