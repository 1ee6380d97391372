"""Object stores: whole objects by key, below one URI.

Law of the room: put, ranged get, list and delete, with errors by name.  It knows nothing of logs,
of Kafka or of what the bytes mean; broker and client both use it.  pyarrow.fs does the work, and is
imported in `filesystems.py` alone, when a store is first used: a broker without tiers does not load
it.  No message, repr or log line has a credential in it.

=============  ====================================================================================
`uri`          what a URI and its properties say; pure
`failures`     which error an answer of a store is, and its remedy; pure
`filesystems`  opens pyarrow's file system of a URI, once for each process
`uploads`      writes one object: whole, or not at all
`store`        `ObjectStore`, on top of these
`presigned`    URLs that carry a signature: made with botocore, read by plain HTTP
`proof`        a put, a get and a delete, for `kdirect doctor`
=============  ====================================================================================
"""

from __future__ import annotations

from kdirect.lazy_names import lazy_names as _lazy_names

_HOME = {
    "ObjectInfo": "kdirect.objects.store",
    "ObjectStore": "kdirect.objects.store",
    "get_presigned": "kdirect.objects.presigned",
}
__all__ = list(_HOME)
__getattr__, __dir__ = _lazy_names(__name__, _HOME)
