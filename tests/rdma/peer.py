"""The other process of a test: executes the code it is sent (conftest.PeerProcess)."""

from __future__ import annotations

import ast
import importlib.util
import os
import pickle
import struct
import sys
import traceback
from pathlib import Path
from typing import Any


def load_conftest() -> Any:
    # At the end, so that the installed package goes before the sources of this tree.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    spec = importlib.util.spec_from_file_location(
        "rdma_conftest", Path(__file__).with_name("conftest.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the code prints goes to standard error
    conftest = load_conftest()
    from kdirect.rdma import open_device, shm_probe
    from kdirect.rdma.contract import Access, Memory, State, Status

    def make_end(**options: Any) -> Any:
        return conftest.End(open_device("shm"), **options)

    names: dict[str, Any] = {
        "make_end": make_end,
        "open_device": open_device,
        "shm_probe": shm_probe,
        "Access": Access,
        "Memory": Memory,
        "State": State,
        "Status": Status,
        "completions": conftest.completions,
        "completion": conftest.completion,
        "eventually": conftest.eventually,
        "join": conftest.join,
        "os": os,
    }
    while True:
        head = source.read(4)
        if len(head) < 4:
            return
        code, given = pickle.loads(source.read(struct.unpack("<I", head)[0]))
        names.update(given)
        try:
            tree = ast.parse(code)
            value = None
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr):
                tree.body.pop()
            exec(compile(tree, "<peer>", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<peer>", "eval"), names)
            answer = (True, value)
        except BaseException:
            answer = (False, traceback.format_exc())
        data = pickle.dumps(answer)
        sink.write(struct.pack("<I", len(data)) + data)
        sink.flush()


if __name__ == "__main__":
    sys.exit(main())
