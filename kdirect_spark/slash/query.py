"""`accelerate` and `explain`: from a DataFrame to one that the state engine computes.

Law: everything that can be wrong with the DataFrame, the arguments and the cluster is found here,
before anything runs.  Nothing is opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdirect.errors import ConfigError
from kdirect.options import ENGINE
from kdirect.state.batches import MOST_EXECUTORS
from kdirect_spark.offsets import Subscribe
from kdirect_spark.settings import FORMAT as KDIRECT
from kdirect_spark.settings import SourceSettings, source_settings
from kdirect_spark.slash import session_facts
from kdirect_spark.slash.batch_service import TOKEN, service_at
from kdirect_spark.slash.catalyst import read_tree
from kdirect_spark.slash.explanation import explained
from kdirect_spark.slash.job_spec import OPTION, JobSpec
from kdirect_spark.slash.plan_reader import read_plan
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.slash.session_facts import Cluster, Relation
from kdirect_spark.slash.slash_plan import Leaf, SlashPlan
from kdirect_spark.values import ValueSettings

MODES = ("slash", "uppar")
OBSERVED = "slash"  # the name of the figures in a query's progress
_UNWRAPPED = "or run this DataFrame unwrapped"
_INSTEAD = "write JSON, Arrow or fixed values without it, " + _UNWRAPPED


def accelerate(
    df: Any,
    mode: str = "slash",
    *,
    epochBytes: int | str | None = None,
    snapshotInterval: int | str | None = None,
    stateDir: str | os.PathLike[str] | None = None,
    executors: int | None = None,
    idleTimeout: int | str | None = None,
    name: str = OBSERVED,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The DataFrame `df`, computed by the state engine: the same rows and the same schema.

    `df` reads topics by ``format("kdirect")`` with `valueFormat`, and aggregates by keys and
    windows or joins two topics in windows; docs/slash.md says what may be in it.  The result of a
    stream has each window once, when the watermark has passed its end; write it in append mode.
    Without a window it has, in each micro-batch, the keys that changed.  A batch has all windows.

    `mode`: ``slash``, or ``uppar``, which partitions rows by key in the same engine.
    `epochBytes`: input of a task after which it sends what changed to the keys' leaders.
    `snapshotInterval`: time between two snapshots (``"30s"``); the topics must keep their records
    for longer.  `stateDir`: the directory of this query's state, on the driver's host; workers that
    see it too write their snapshots there themselves.  By default one is made for each checkpoint
    below ``~/.local/state/kdirect/slash``.
    `executors`: tasks of each micro-batch, by default as many as can run at the same time.
    `idleTimeout`: how long a partition may be without new records before it holds no window open;
    by default for ever.  `name`: of the figures in the query's progress (observed metrics).
    `options`: others of the state engine (docs/options.md).

    Raises UnsupportedPlanError for what cannot be computed as Spark does, and ConfigError for
    arguments and clusters that cannot be; each names the thing and the remedy."""
    query = _Query(df, mode, executors, idleTimeout, options, epochBytes, snapshotInterval)
    return query.data_frame(stateDir, name)


def explain(
    df: Any,
    mode: str = "slash",
    *,
    epochBytes: int | str | None = None,
    executors: int | None = None,
    idleTimeout: int | str | None = None,
) -> None:
    """Print how `accelerate` with these arguments would compute `df`: what is read, what each task
    keeps, who leads which keys, and what Spark still does."""
    query = _Query(df, mode, executors, idleTimeout, None, epochBytes, None)
    print(query.explanation())


class _Query:
    """A DataFrame that was read and checked."""

    def __init__(
        self,
        df: Any,
        mode: str,
        executors: int | None,
        idle_timeout: int | str | None,
        options: Mapping[str, Any] | None,
        epoch_bytes: int | str | None,
        snapshot_interval: int | str | None,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(
                f"accelerate: mode={mode!r} is not known", hint=f"use one of {', '.join(MODES)}"
            )
        self._df = df
        self._mode = mode
        given = dict(options or {})
        if epoch_bytes is not None:
            given["epoch_bytes"] = epoch_bytes
        if snapshot_interval is not None:
            given["snapshot_interval"] = _milliseconds(snapshot_interval, "snapshotInterval")
        self._resolved = ENGINE.resolve(given)
        self._options = given
        self._session = df.sparkSession
        conf = self._session.conf
        found = session_facts.relations(df)
        self._settings = [_settings_of(relation) for relation in found]
        idle_ms = None if idle_timeout is None else _milliseconds(idle_timeout, "idleTimeout")
        leaves = [
            _leaf(relation, settings, idle_ms) for relation, settings in zip(found, self._settings)
        ]
        self.plan: SlashPlan = read_plan(
            read_tree(*session_facts.analyzed_plan(df)),
            leaves,
            schema=df.schema.json(),
            ansi=conf.get("spark.sql.ansi.enabled", "true").lower() == "true",
            time_zone=conf.get("spark.sql.session.timeZone"),
        )
        self._relations = found
        self._check_inputs()
        cluster = session_facts.settled_cluster(self._session)
        self._cluster = cluster
        self.executors = check_cluster(cluster, executors)

    def _check_inputs(self) -> None:
        used = [self._settings[i] for i in self.plan.leaves]
        for settings in used:
            assert settings is not None
            if not settings.fail_on_data_loss:
                raise ConfigError(
                    "accelerate: failOnDataLoss=false is not supported: state that is rebuilt from"
                    " a log with holes would be another one",
                    hint="remove the option, " + _UNWRAPPED,
                )
        first = used[0]
        if any(one.client != first.client for one in used[1:]):  # type: ignore[union-attr]
            raise ConfigError(
                "accelerate: the two inputs of the join have other client settings",
                hint="give both sources the same kafka.* options: one broker's connections serve"
                " both",
            )

    def explanation(self) -> str:
        return explained(
            self.plan,
            executors=self.executors,
            mode=self._mode,
            epoch_bytes=self._resolved["epoch_bytes"],
        )

    def data_frame(self, state_dir: str | os.PathLike[str] | None, name: str) -> Any:
        from kdirect_spark.slash.frames import frame_of

        plan = self.plan
        settings = self._settings[plan.leaves[0]]
        assert settings is not None
        spec = JobSpec(
            plan=plan.plan,
            inputs=tuple(self._relations[i].options for i in plan.leaves),
            executors=self.executors,
            mode=self._mode,
            state_dir=None if state_dir is None else str(Path(state_dir).absolute()),
            state_root=str(state_root()),
            options=self._for_cluster(),
            name=name,
            logs=session_facts.logs_info(self._session),
        )
        given = {OPTION: spec.to_text()}
        if not plan.is_streaming:
            at = spec.resolved_options()
            address = service_at(at["listen_address"], at["advertised_address"])
            given[TOKEN] = address.to_text()
        return frame_of(
            self._session, plan, given, settings.task_client, name=name, schema=self._df.schema
        )

    def _for_cluster(self) -> dict[str, Any]:
        """The engine's options; tasks of other hosts must reach the coordinator at the driver."""
        given = dict(self._options)
        if not self._cluster.is_local and "listen_address" not in given:
            given["listen_address"] = self._cluster.driver_host
        return given


def check_cluster(cluster: Cluster, executors: int | None) -> int:
    """How many tasks a micro-batch has.  Raises ConfigError where so many cannot run at once."""
    if cluster.dynamic_allocation:
        raise ConfigError(
            "accelerate: spark.dynamicAllocation.enabled is true, and all tasks of a micro-batch"
            " must run at the same time",
            hint="set it to false for this application, " + _UNWRAPPED,
        )
    if cluster.slots == 0:
        raise ConfigError(
            "accelerate: the application has no slot for a task: none of its workers has come",
            hint="wait for the cluster, look at its workers, " + _UNWRAPPED,
        )
    if executors is None:
        executors = min(cluster.slots, MOST_EXECUTORS)
    if not isinstance(executors, int) or not 1 <= executors <= MOST_EXECUTORS:
        raise ConfigError(
            f"accelerate: executors={executors!r} cannot be", hint=f"give 1 to {MOST_EXECUTORS}"
        )
    if executors > cluster.slots:
        raise ConfigError(
            f"accelerate: {executors} tasks must run at the same time, and the cluster has"
            f" {cluster.slots} slots",
            hint="give fewer executors, or the application more cores",
        )
    return executors


def state_root() -> Path:
    """Below which directories of state are made for queries that name none."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home, "kdirect", "slash")


def _milliseconds(value: int | str, name: str) -> int:
    """A time as an argument has it: a number of milliseconds, or ``"30s"``."""
    from kdirect.option_table import duration_ms

    try:
        return value if isinstance(value, int) else int(duration_ms(value))
    except ConfigError as e:
        raise ConfigError(f"accelerate: {name}: {e.message}", hint=e.hint) from None


def _settings_of(relation: Relation) -> SourceSettings | None:
    """None for a relation that is not kdirect's: the reader of plans refuses it by name."""
    if relation.source != KDIRECT:
        return None
    return source_settings(relation.options, streaming=relation.is_streaming)


def _not_the_engines(topic: str, values: ValueSettings) -> str:
    """Why the state engine does not read values so."""
    if values.format in ("avro", "protobuf"):
        why = f"in {values.format}"
    elif values.mode == "PERMISSIVE":
        why = "with a row for each that does not decode (valueMode=PERMISSIVE)"
    elif values.framed:
        why = "with Confluent's frame (valueFraming)"
    elif values.metadata:
        why = "with Kafka's columns (metadataColumns)"
    else:
        why = "with columns that hold others"
    return f"topic {topic} is read {why}, which the state engine does not do"


def _leaf(relation: Relation, settings: SourceSettings | None, idle_ms: int | None) -> Leaf:
    if settings is None:
        return Leaf(
            topic="", value_format="", fields=(), source=relation.source,
            is_streaming=relation.is_streaming,
        )  # fmt: skip
    chosen = settings.subscription
    if not isinstance(chosen, Subscribe) or len(chosen.topics) != 1:
        raise ConfigError(
            "accelerate: a source reads several topics, or a part of one",
            hint="give option subscribe one topic; unite topics in the one that is written, "
            + _UNWRAPPED,
        )
    values = settings.values
    if values is not None and not values.is_engines:
        raise unsupported(_not_the_engines(chosen.topics[0], values), _INSTEAD)
    return Leaf(
        topic=chosen.topics[0],
        value_format="" if values is None else values.format,
        fields=() if values is None else values.fields,
        layout=None if values is None else values.layout,
        mode="PERMISSIVE" if values is None else values.engine_mode,
        is_streaming=relation.is_streaming,
        idle_timeout_ms=idle_ms,
        max_ahead_us=1 << 56,
    )
