"""Java's Admin and Kafka's own tools against our broker."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def new_topic(java, name, partitions=1, **configs):
    topic = java.kafka.clients.admin.NewTopic(name, partitions, java.gateway.jvm.short(1) if False else 1)
    return topic


def test_x(java, admin):
    print(list(java.get(admin.listTopics().names())))
