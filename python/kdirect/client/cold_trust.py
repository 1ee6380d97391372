"""Which object store a client goes to with its credentials.  Pure.

A broker names the store in its answers.  A forged one could name a server of its own, and a client
that believed it would hand it what authenticates the client: a bearer token, or signed requests.
So whoever holds credentials says itself where they go:

==========================  =======================================================================
the client has              and then
==========================  =======================================================================
``remote.storage.uri``      its own URI is used, never the broker's.  A broker that names another
                            place (scheme, bucket, path, endpoint) is refused
``remote.config.*`` alone   refused, but for ``anonymous``: nothing says where the secrets are to go
neither: the environment    the broker's URI is used where it can only lead to the provider itself:
                            a directory, or a store without any parameter that redirects requests.
                            Others are refused
==========================  =======================================================================

In each case only keys below that URI are read, of the form that segments have, and only of the
topic that is read (`cold_places`).  Signed URLs need none of this: they are read without
credentials, and without following redirects.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from kdirect.errors import KdirectError, RemoteAccessError
from kdirect.objects.uri import StoreUri, parse

# Parameters that change nothing about whose server gets the requests.
_HARMLESS = frozenset({"region", "anonymous", "project_id"})
# Where a host in the URI is the provider's own, or there is none.
_OF_PROVIDERS = frozenset({"s3", "gs", "file"})
_AZURE_HOST = ".core.windows.net"
# Of these two URIs have to agree; others, such as a region, say how a store is reached.
_PLACE = ("endpoint_override", "blob_storage_authority", "dfs_storage_authority")


def trusted_uri(broker: str, own: str | None, config: Mapping[str, str]) -> str:
    """The URI to open with the client's properties `config` for a broker that names `broker`;
    RemoteAccessError where it may not be."""
    if own is not None:
        mine = parse(own, config)
        try:
            theirs = parse(broker, {})
        except KdirectError as e:
            raise RemoteAccessError(
                f"the broker names an object store that cannot be: {e.message}",
                hint="look at remote.log.storage.uri of the broker",
            ) from None
        if _place(mine) != _place(theirs):
            raise RemoteAccessError(
                f"the broker keeps records in {theirs.text}, and remote.storage.uri is {mine.text}",
                hint="set it to remote.log.storage.uri of the broker, if the credentials of this"
                " client are for that store",
            )
        return own
    if set(config) - {"anonymous"}:
        raise RemoteAccessError(
            "remote.config.* is set, and nothing says which store it is for",
            hint="set remote.storage.uri to remote.log.storage.uri of the broker",
        )
    theirs = parse(broker, config)
    anonymous = theirs.settings.get("anonymous", "").lower() == "true"
    if anonymous or (_is_of_provider(theirs) and not theirs.settings.keys() - _HARMLESS):
        return broker
    raise RemoteAccessError(
        f"the broker keeps records in {theirs.text}, which may be any server: it gets no"
        " credentials of this process's environment",
        hint="set remote.storage.uri to remote.log.storage.uri of the broker, if they are for it",
    )


def _place(uri: StoreUri) -> tuple[object, ...]:
    parts = urlsplit(uri.text)
    host = "" if uri.scheme.bucket == "bucket" else parts.netloc
    return uri.scheme.name, host, uri.root, *(uri.settings.get(name, "") for name in _PLACE)


def _is_of_provider(uri: StoreUri) -> bool:
    if uri.scheme.name in _OF_PROVIDERS:
        return True
    host = urlsplit(uri.text).hostname or ""
    return uri.scheme.name == "abfs" and host.endswith(_AZURE_HOST)


__all__ = ["trusted_uri"]
