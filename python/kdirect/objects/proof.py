"""Whether a store does what kdirect asks of it: a put, a ranged get, a list and a delete of a small
object with a name of its own.

Owns: the steps of `kdirect doctor --remote-storage`.  It leaves nothing behind, unless the store
permits no delete, and then says what.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from kdirect.errors import KdirectError
from kdirect.objects.store import ObjectStore

FOLDER = "kdirect-doctor"
PROOF_BYTES = 64 << 10
POSITION, LENGTH = 1000, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofStep:
    """One request and what came of it; `hint` says what to do when not `ok`."""

    step: str
    ok: bool
    detail: str
    hint: str = ""


def prove(store: ObjectStore) -> list[ProofStep]:
    """The steps in order; after the first that fails only the object is removed."""
    key = f"{FOLDER}/{secrets.token_hex(8)}"
    proof = os.urandom(PROOF_BYTES)
    steps: list[ProofStep] = []

    def get() -> str:
        read = store.get(key, POSITION, LENGTH)
        same = bytes(read) == proof[POSITION : POSITION + LENGTH]
        return "" if same else f"other bytes than were put under {key}"

    def listed() -> str:
        found = {o.key: o.size for o in store.list(f"{FOLDER}/")}
        return "" if found.get(key) == PROOF_BYTES else f"{key} is not listed"

    def gone() -> str:
        store.delete(key)
        return "" if store.size(key) is None else f"{key} is still there"

    put = _step("remote put", lambda: store.put(key, PROOF_BYTES, [proof]), f"{PROOF_BYTES} bytes")
    steps.append(put)
    if put.ok:
        steps.append(_step("remote get", get, f"{LENGTH} bytes at {POSITION}"))
        steps.append(_step("remote list", listed, f"the folder {FOLDER}/"))
        deleted = _step("remote delete", gone, "the object")
        steps.append(deleted)
    return steps


def _step(name: str, do: Callable[[], str | None], what: str) -> ProofStep:
    started = time.perf_counter()
    try:
        wrong = do()
    except KdirectError as e:
        return ProofStep(step=name, ok=False, detail=e.message, hint=e.hint)
    if wrong:
        return ProofStep(
            step=name, ok=False, detail=wrong, hint="the store does not keep what it is given"
        )
    took = (time.perf_counter() - started) * 1000
    return ProofStep(step=name, ok=True, detail=f"{what} in {took:.0f} ms")
