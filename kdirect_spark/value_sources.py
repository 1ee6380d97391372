"""Where the schemas of values in Avro and Protobuf are from.

Owns: how options, a descriptor file and the registry become an `AvroSource` or a `ProtobufSource`,
which is what a task is told of a schema.

Law: a planner may read a descriptor file and ask the registry here, at no other place.  What it
has found goes to the tasks, so all of them read by one schema, whatever is registered meanwhile.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.types import StructType

from kdirect.errors import ConfigError
from kdirect_spark.registry import Registry, RegistrySettings, Written, registry
from kdirect_spark.values import AvroSource, ProtobufSource


def avro_source(
    reader: str | None,
    writer: str | None,
    wanted: StructType | None,
    registry_settings: RegistrySettings | None,
    subject: str | None,
) -> tuple[AvroSource, StructType]:
    """The schema of Avro values and the row that they become: `wanted`, or all columns.  Raises
    ConfigError, SchemaRegistryError."""
    from kdirect_spark.avro_schema import AvroSchema

    if writer is not None:
        if registry_settings is not None:
            raise ConfigError(
                "options avroWriterSchema and schema.registry.url exclude each other",
                hint="remove one: the registry has the schema that each value was written by",
            )
        AvroSchema(writer, "option avroWriterSchema")
    if reader is not None:
        schema = AvroSchema(reader, "option avroSchema")
        row = chosen(schema.row, wanted, "option avroSchema")
        return AvroSource(reader, writer=writer), row
    if registry_settings is None:
        raise ConfigError(
            "valueFormat=avro needs a schema",
            hint="give it with avroSchema, or where it is registered with schema.registry.url",
        )

    def tried(written: Written, what: str) -> tuple[AvroSource, StructType]:
        others = tuple(text for _, text in written.references)
        row = AvroSchema(written.text, what, others).row
        return AvroSource(written.text, others, what=what), chosen(row, wanted, what)

    return _latest(registry(registry_settings), _subject(subject), "AVRO", None, tried)


def protobuf_source(
    file: str | None,
    message: str | None,
    wanted: StructType | None,
    registry_settings: RegistrySettings | None,
    subject: str | None,
) -> tuple[ProtobufSource, StructType]:
    """As `avro_source`, for Protobuf."""
    from kdirect_spark.protobuf_values import ProtobufMessage, descriptor_set

    def found(descriptors: bytes, what: str) -> tuple[ProtobufSource, StructType]:
        of_file = ProtobufMessage(descriptors, message, what)
        return ProtobufSource(descriptors, of_file.name, what), chosen(of_file.row, wanted, what)

    if file is not None:
        if message is None:
            raise ConfigError(
                "option descriptorFile needs messageName", hint="name the message of a value"
            )
        try:
            with open(file, "rb") as f:
                return found(f.read(), f"the descriptor file {file}")
        except OSError as e:
            raise ConfigError(
                f"option descriptorFile: {file} cannot be read: {e.strerror}",
                hint="give the path, on the driver, of a file that protoc --include_imports "
                "--descriptor_set_out wrote",
            ) from None
    if registry_settings is None:
        raise ConfigError(
            "valueFormat=protobuf needs a schema",
            hint="give descriptorFile and messageName, or where it is registered with "
            "schema.registry.url",
        )

    def tried(written: Written, what: str) -> tuple[ProtobufSource, StructType]:
        return found(descriptor_set([*written.references, ("", written.text)], what), what)

    client = registry(registry_settings)
    return _latest(client, _subject(subject), "PROTOBUF", "serialized", tried)


def _subject(subject: str | None) -> str:
    if subject is None:
        raise ConfigError(
            "the query reads several topics, so it is not known under which subject their schema is"
            " registered",
            hint="name it with schema.registry.subject",
        )
    return subject


def _latest(
    client: Registry, subject: str, kind: str, form: str | None, tried: Any
) -> tuple[Any, StructType]:
    """What `tried` makes of the latest version of a subject.  A query asks more than once, with
    the columns that it found at first; if another version has come since, the one that has these
    columns is looked for."""
    first: ConfigError | None = None
    for version in reversed(client.versions(subject)):
        written = client.version(subject, version, form)
        what = f"version {version} of subject {subject}"
        if written.kind != kind:
            first = first or ConfigError(
                f"{what} is of type {written.kind}, and valueFormat={kind.lower()}",
                hint="set valueFormat as the values are, or schema.registry.subject",
            )
            break
        try:
            return tried(written, what)
        except ConfigError as e:
            first = first or e
    assert first is not None
    raise first


def chosen(row: StructType, wanted: StructType | None, what: str) -> StructType:
    """The columns that are wanted, which `row` must have."""
    if wanted is None:
        return row
    there = {f.name: f.dataType for f in row}
    for f in wanted:
        if f.name not in there:
            raise ConfigError(
                f"{what} has no field {f.name}", hint=f"choose from {', '.join(there)}"
            )
        if f.dataType.simpleString() != there[f.name].simpleString():
            raise ConfigError(
                f"column {f.name} is {f.dataType.simpleString()} by the query's schema and "
                f"{there[f.name].simpleString()} by {what}",
                hint="remove .schema(...) and valueSchema, or correct them",
            )
    return wanted
