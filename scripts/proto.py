"""Generate baton/pb from proto/, or with --check fail when the checked-in stubs are not current.

protoc writes absolute imports after the proto path (`from baton.v1 import kv_pb2`); the stubs live in
`baton.pb`, so those imports are rewritten. File names inside the descriptors keep the proto path, which is
what reflection shows.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "baton" / "pb"


def generate(target: Path) -> None:
    """Write the stubs of every proto file into `target`."""
    with tempfile.TemporaryDirectory() as scratch:
        protos = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
        flags = [f"--{kind}={scratch}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
        if protoc.main(["protoc", f"-I{ROOT / 'proto'}", *flags, *protos]):
            raise SystemExit("protoc failed")
        for path in sorted((Path(scratch) / "baton" / "v1").iterdir()):
            text = re.sub(r"^from baton\.v1 import", "from baton.pb import", path.read_text(), flags=re.MULTILINE)
            (target / path.name).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the checked-in stubs, write nothing")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        names = sorted(path.name for path in Path(scratch).iterdir())
        _, changed, missing = filecmp.cmpfiles(scratch, TARGET, names, shallow=False)
    stale = sorted(path.name for path in TARGET.glob("*_pb2*") if path.name not in names)
    if changed or missing or stale:
        print(f"stubs are not current (run make proto): {sorted([*changed, *missing, *stale])}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
