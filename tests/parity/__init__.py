"""Scenarios of Spark's Kafka suites, each with format("kafka") and format("kdirect")."""
