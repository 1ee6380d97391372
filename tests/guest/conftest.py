"""Tests that boot guests are collected only where KDIRECT_TEST_GUESTS=1 is set, which `make
test-rdma` and `make test-rdma-spark` do."""

from __future__ import annotations

import os

collect_ignore_glob = (
    []
    if os.environ.get("KDIRECT_TEST_GUESTS", "0") not in ("", "0")
    else ["test_two_hosts.py", "test_spark_hosts.py"]
)
