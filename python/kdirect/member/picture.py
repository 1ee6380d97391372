"""What a broker reads of the cluster, kept up to date: the image of topics, and who lives.

A controller's every commit replaces ``/kdirect/changes``.  This watches that one node and reads
what the changes name that it has not seen; after more changes than the node keeps, or where it is
damaged, it reads everything.  So a missed watch costs nothing: the next look finds the generation
that is missing.

What a commit changes is read in the order topics, states, configs: a config is never older than the
states that were decided by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kdirect.cluster import paths, records
from kdirect.cluster.image import Image, absorb, read_brokers
from kdirect.errors import CorruptMetadataError
from kdirect.member.loop_store import LoopStore
from kdirect.member.metadata import NO_IMAGE, LiveNode
from kdirect.member.reports import Reports
from kdirect.member.tree_reader import ROOTS, read_tree
from kdirect.store.contract import Children, Found, Node, check_path

UNSEEN = -1


class Picture:
    """See the module.  One for each session, on the event loop.  `brokers` is None until they were
    read; `generation` is `UNSEEN` where it is not known what the image has, and then the next look
    reads everything.  `changed()` is called when `image` or `brokers` is another one."""

    def __init__(self, store: LoopStore, reports: Reports, changed: Callable[[], None]) -> None:
        self.image: Image = NO_IMAGE
        self.generation = UNSEEN
        self.brokers: Mapping[int, LiveNode] | None = None
        self.times_read_whole = 0
        self._has_image = False
        self._store = store
        self._reports = reports
        self._changed = changed
        self._looking = False
        self._again = False

    @property
    def is_complete(self) -> bool:
        return self.brokers is not None and self._has_image

    # -- topics ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what has changed.  Called at each connection, and when the watch tells."""
        if self._looking:
            self._again = True
            return
        self._looking, self._again = True, False
        self._store.read((paths.CHANGES,), self._looked, watch=True)

    def _looked(self, answer: Any) -> None:
        if not isinstance(answer, Found):
            self._done()  # after a lost connection there is another one, which looks again
            return
        (node,) = answer.nodes
        changes = None
        if node is not None:
            try:
                changes = records.decode_changes(paths.CHANGES, node.value)
            except CorruptMetadataError as e:
                self._reports.error(e)
        wanted = self._unseen(changes)
        generation = changes.generation if changes is not None else UNSEEN
        if wanted is None:
            self.times_read_whole += 1
            read_tree(self._store, ROOTS, lambda nodes: self._read_whole(generation, nodes))
        elif wanted:
            ordered = sorted(wanted, key=_rank)
            self._store.read(ordered, lambda a: self._read_changed(generation, ordered, a))
        else:
            self.generation = generation
            self._done()

    def _unseen(self, changes: records.Changes | None) -> tuple[str, ...] | None:
        """The paths that have changed since the last look; None: read everything."""
        if changes is None or self.generation == UNSEEN:
            return None
        wanted = changes.since(self.generation)
        try:
            for path in wanted or ():
                check_path(path)
        except ValueError as e:
            self._reports.error(f"node {paths.CHANGES} is damaged: {e}; delete the node")
            return None
        return wanted

    def _read_whole(self, generation: int, nodes: dict[str, Node] | None) -> None:
        if nodes is not None:
            ordered: dict[str, Node | None] = {p: nodes[p] for p in sorted(nodes, key=_rank)}
            self._has_image = True
            self._take(absorb(NO_IMAGE, ordered), generation)
        self._done()

    def _read_changed(self, generation: int, wanted: list[str], answer: Any) -> None:
        if isinstance(answer, Found):
            nodes = dict(zip(wanted, answer.nodes, strict=True))
            self._take(absorb(_forget(self.image, nodes), nodes), generation)
        self._done()

    def _take(self, image: Image, generation: int) -> None:
        for error in image.damaged.values():
            self._reports.error(error)
        self.image, self.generation = image, generation
        self._changed()

    def look_at_damaged(self) -> None:
        """Read everything again if somebody has mended a damaged node, which no change names."""
        damaged = tuple(path for path in self.image.damaged if path != paths.CHANGES)
        if damaged and not self._looking:
            self._store.read(damaged, lambda answer: self._looked_at_damaged(damaged, answer))

    def _looked_at_damaged(self, damaged: tuple[str, ...], answer: Any) -> None:
        if isinstance(answer, Found):
            versions = [node.version if node is not None else None for node in answer.nodes]
            if versions != [self.image.versions.get(path) for path in damaged]:
                self.generation = UNSEEN
                self.look()

    def _done(self) -> None:
        self._looking = False
        if self._again:
            self.look()

    # -- brokers -----------------------------------------------------------------------------------

    def look_for_brokers(self) -> None:
        """Read who is registered.  Called at each connection, and when the watch tells."""
        self._store.children((paths.BROKER_IDS,), self._named, watch=True)

    def _named(self, answer: Any) -> None:
        if isinstance(answer, Children):
            wanted = [f"{paths.BROKER_IDS}/{name}" for name in answer.names[0] or ()]
            self._store.read(wanted, lambda found: self._read_brokers(wanted, found))

    def _read_brokers(self, wanted: Iterable[str], answer: Any) -> None:
        if not isinstance(answer, Found):
            return
        pairs = zip(wanted, answer.nodes, strict=True)
        nodes = {path: node for path, node in pairs if node is not None}
        live, wrong = read_brokers(nodes)
        for error in wrong:
            self._reports.error(error)
        self.brokers = {
            number: LiveNode(
                number,
                records.decode_broker(paths.broker(number), nodes[paths.broker(number)].value),
                there.incarnation,
                there.intact_since,
            )
            for number, there in sorted(live.items())
        }
        self._changed()


async def read_image(store: LoopStore) -> Image | None:
    """What there is now of topics and configs; None when the connection was lost."""
    read: asyncio.Future[dict[str, Node] | None] = asyncio.get_running_loop().create_future()

    def done(nodes: dict[str, Node] | None) -> None:
        if not read.done():
            read.set_result(nodes)

    read_tree(store, ROOTS, done)
    nodes = await read
    if nodes is None:
        return None
    return absorb(NO_IMAGE, {path: nodes[path] for path in sorted(nodes, key=_rank)})


def _rank(path: str) -> tuple[int, int, str]:
    """Topics and their deletions, then states, then configs; parents first."""
    if paths.partition_of_state(path) is not None:
        kind = 1
    elif path.startswith("/config/"):
        kind = 2
    elif path.startswith(paths.DELETIONS):
        kind = 3  # it is about a topic that is there
    else:
        kind = 0
    return kind, path.count("/"), path


def _forget(image: Image, nodes: Mapping[str, Node | None]) -> Image:
    """The image without topics that are gone, or that are others of the same name by now."""
    topics = dict(image.topics)
    gone: set[str] = set()  # nodes of which the changes name the topic's alone
    for path, node in nodes.items():
        name = paths.name_below(path, paths.TOPICS)
        if name is None or name not in topics:
            continue
        if node is None or _is_another(topics[name].record, path, node):
            del topics[name]
            gone |= {paths.topic_config(name), paths.deletion(name)}
            gone |= {p for p in image.versions if p.startswith(path + "/")}
    if len(topics) == len(image.topics):
        return image
    versions = {p: version for p, version in image.versions.items() if p not in gone}
    damaged = {p: error for p, error in image.damaged.items() if p not in gone}
    return image._replace(topics=topics, versions=versions, damaged=damaged)


def _is_another(record: records.TopicAssignment, path: str, node: Node) -> bool:
    try:
        return records.decode_topic(path, node.value).topic_id != record.topic_id
    except CorruptMetadataError:
        return False  # it is kept as it was known, and reported
