"""Packed weights in a file that workers share: who builds it, who waits, what becomes of a file that does not fit."""

import ctypes
import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from baton.engine import load
from baton.engine.load import load_model
from baton.errors import ConfigError
from baton.native import mapping, shared
from baton.native.decoder import NativeDecoder
from baton.native.packed import LoadedWeight, PackedWeights
from baton.native.shared import share_weights
from baton.process.load_progress import LoadProgress
from tests.checkpoints import make_checkpoint, prompt_ids
from tests.kernels import LIBRARY, needs_native
from tests.unit.model.runner import chunked_logits

KEY = {"model": "m", "layout": "1"}
OTHER = {"model": "n", "layout": "1"}
PAGE = os.sysconf("SC_PAGESIZE")

BUILDER = """
import sys
import torch
from baton.native.packed import LoadedWeight
from baton.native.shared import share_weights

def stop(memory):
    memory.fill_(9)
    print("half", flush=True)
    sys.stdin.read()

share_weights(sys.argv[1], {"model": "m", "layout": "1"}, lambda: [LoadedWeight("a", 3000, torch.float32, stop)], 1)
"""

CROWDED = """
import errno, logging, resource, sys
import torch
from baton.native import shared
from baton.native.packed import LoadedWeight

path, *cases = sys.argv[1:]

def unknown(*_, **__):
    raise OSError(errno.EINVAL, "Invalid argument")

def load():
    return [LoadedWeight("a", 8 << 20, torch.uint8, lambda to: to.fill_(9))]

logging.basicConfig()
populate = shared.populate
for case in cases:
    if case == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    if case == "full to the last page":
        with open(path + ".other", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    shared.populate = unknown if case == "allocated" else populate
    weights = shared.share_weights(path, {}, load, 2)
    print(case, bytes(weights.memory["a"].numpy()) == bytes([9]) * (8 << 20), flush=True)
"""


def tensors(first: float) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(3000.0) + first, "b": torch.full((5,), first, dtype=torch.bfloat16)}


def weights(first: float = 1.0) -> list[LoadedWeight]:
    return [
        LoadedWeight(name, len(tensor), tensor.dtype, partial(torch.Tensor.copy_, other=tensor))
        for name, tensor in tensors(first).items()
    ]


def no_load() -> list[LoadedWeight]:
    pytest.fail("the checkpoint is read")


def content(packed: PackedWeights, first: float = 1.0) -> bool:
    """Whether kernels would read what `weights(first)` has."""
    wanted = {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors(first).items()}
    return {name: ctypes.string_at(at, len(wanted[name])) for name, at in packed.addresses.items()} == wanted


def permissions(address: int) -> str:
    """Of the mapping at an address."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, flags = line.split()[:2]
        start, end = span.split("-")
        if int(start, 16) <= address < int(end, 16):
            return flags
    raise AssertionError("not mapped")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "packed")


def test_the_second_maps_what_the_first_has_built(path: str) -> None:
    built = share_weights(path, KEY, weights, 2)
    mapped = share_weights(path, KEY, no_load, 2)
    assert content(built)
    assert content(mapped)
    assert all(where % 64 == 0 for where in (*built.addresses.values(), *mapped.addresses.values()))
    assert {permissions(packed.addresses["a"]) for packed in (built, mapped)} == {"r--s"}


@needs_native
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_logits_are_those_of_private_weights(tmp_path: Path, path: str, family: str, tied: bool) -> None:
    checkpoint, ids = make_checkpoint(family, tmp_path, tied=tied), prompt_ids(40)
    models = [
        load_model(checkpoint, dtype=torch.bfloat16, native=LIBRARY, packed_weights=to) for to in ("", path, path)
    ]
    private, built, mapped = (chunked_logits(model, ids, 16, 16) for model in models)
    assert torch.equal(built, private)
    assert torch.equal(mapped, private)
    decoder = models[2].decoder
    assert isinstance(decoder, NativeDecoder)
    assert (decoder._model.embedding == decoder._model.head) == tied


@needs_native
def test_other_weights_have_another_key(tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    one, other = (make_checkpoint("qwen3", tmp_path / str(seed), seed=seed) for seed in (1, 2))
    first = load_model(one, dtype=torch.float32, native=LIBRARY, packed_weights=path)
    second = load_model(other, dtype=torch.float32, native=LIBRARY, packed_weights=path)
    assert f"other workers use it, with model {first.fingerprint}, not {second.fingerprint}" in caplog.text
    ids = prompt_ids(20)
    private = chunked_logits(load_model(other, dtype=torch.float32, native=LIBRARY), ids, 16, 16)
    assert torch.equal(chunked_logits(second, ids, 16, 16), private)


@needs_native
def test_weights_packed_by_other_code_have_another_key(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, known = make_checkpoint("qwen3", tmp_path), load.packing_hash()
    first = load_model(checkpoint, dtype=torch.float32, native=LIBRARY, packed_weights=path)
    monkeypatch.setattr(load, "packing_hash", lambda: "0")
    load_model(checkpoint, dtype=torch.float32, native=LIBRARY, packed_weights=path)
    assert re.search(rf"other workers use it, with layout {known}-\w+, not 0-\w+;", caplog.text)
    del first


@pytest.mark.parametrize("changed", ["native/packed.py", "model/rope.py", "model/attention/__init__.py"])
def test_code_that_packs_and_loads_is_hashed(tmp_path: Path, changed: str) -> None:
    baton = Path(load.__file__).parents[1]
    folders = [shutil.copytree(baton / name, tmp_path / name) for name in ("model", "native")]
    assert load.packing_hash(folders) == load.packing_hash()
    with (tmp_path / changed).open("a") as file:
        file.write("\n")
    assert load.packing_hash(folders) != load.packing_hash()


def test_another_key_is_replaced_only_where_nobody_uses_it(path: str, caplog: pytest.LogCaptureFixture) -> None:
    first = share_weights(path, KEY, weights, 1)
    private = share_weights(path, OTHER, lambda: weights(7.0), 1)
    assert content(private, 7.0)
    assert re.search(
        "packed_weights: .*/packed: other workers use it, with model m, not n; .* copy of its own", caplog.text
    )
    assert content(first)
    del first, private
    assert content(share_weights(path, OTHER, lambda: weights(7.0), 1), 7.0)
    assert content(share_weights(path, OTHER, no_load, 1), 7.0)


@pytest.mark.parametrize("kept", [0, 20, 33, 45, 200, PAGE, -1], ids=lambda kept: f"{kept} bytes")
def test_a_file_that_is_cut_is_built_anew(path: str, kept: int) -> None:
    share_weights(path, KEY, weights, 1)
    os.truncate(path, kept if kept >= 0 else os.path.getsize(path) + kept)
    assert content(share_weights(path, KEY, weights, 1))
    assert content(share_weights(path, KEY, no_load, 1))


@pytest.mark.parametrize("damage", [b"\xff", b"}", b"[1]"])
def test_a_damaged_index_is_built_anew(path: str, damage: bytes) -> None:
    share_weights(path, KEY, weights, 1)
    with open(path, "r+b") as file:
        file.seek(shared._PREFIX.size)
        file.write(damage)
    assert content(share_weights(path, KEY, weights, 1))


def test_tensors_beyond_the_end_are_not_mapped(path: str) -> None:
    share_weights(path, KEY, weights, 1)
    whole = Path(path).read_bytes()
    at = re.search(rb'"a": \[(\d+), (\d+)\]', whole)
    assert at is not None
    Path(path).write_bytes(whole[: at.start(2)] + b"9" * len(at[2]) + whole[at.end(2) :])
    assert content(share_weights(path, KEY, weights, 1))


def test_a_file_that_is_not_ours_is_named_and_left_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(path).write_text("a letter")
    with pytest.raises(ConfigError, match=r"^packed_weights: .*/packed is not a file of packed weights"):
        share_weights(path, KEY, no_load, 1)
    assert Path(path).read_text() == "a letter"
    with pytest.raises(ConfigError, match=r"^packed_weights: .*: Is a directory"):
        share_weights(str(Path(path).parent), KEY, no_load, 1)
    with pytest.raises(ConfigError, match=r"^packed_weights: /dev/null is not a regular file"):
        share_weights("/dev/null", KEY, no_load, 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"^packed_weights: .*/packed belongs to another user, uid \d+"):
        share_weights(path, KEY, no_load, 1)


@pytest.mark.parametrize("mode", [0o620, 0o602], ids=oct)
def test_a_file_that_others_may_write_is_refused(path: str, mode: int) -> None:
    share_weights(path, KEY, weights, 1)
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=rf"^packed_weights: .*/packed can be written by other users.* {mode:o}"):
        share_weights(path, KEY, no_load, 1)
    os.chmod(path, 0o640)
    assert content(share_weights(path, KEY, no_load, 1))


def test_a_symbolic_link_is_refused(path: str) -> None:
    os.symlink(f"{path}.elsewhere", path)
    with pytest.raises(ConfigError, match=r"^packed_weights: .*/packed: is a symbolic link$"):
        share_weights(path, KEY, no_load, 1)
    assert not os.path.exists(f"{path}.elsewhere")


@pytest.mark.parametrize("memory", [True, False])
def test_the_file_of_up_is_shared_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: bool) -> None:
    monkeypatch.setattr(mapping, "huge_pages_of", lambda fd: ("memfd:" in os.readlink(f"/proc/self/fd/{fd}")) == memory)
    fd = mapping.unnamed_file(tmp_path, 1000)
    try:
        path = f"/proc/{os.getpid()}/fd/{fd}"
        assert content(share_weights(path, KEY, weights, 1))
        assert content(share_weights(path, KEY, no_load, 1))
    finally:
        os.close(fd)


def test_a_waiting_process_builds_when_the_builder_is_killed(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    waiting, found = threading.Event(), []

    handler = logging.Handler()
    handler.addFilter(lambda record: "waiting for a worker" in record.getMessage())
    handler.emit = lambda _: waiting.set()  # type: ignore[method-assign]
    logging.getLogger(shared.__name__).addHandler(handler)
    builder = subprocess.Popen([sys.executable, "-c", BUILDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert builder.stdout.readline() == b"half\n"
        threads = [
            threading.Thread(target=lambda: found.append(share_weights(path, KEY, weights, 1))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        assert waiting.wait(60)
        assert found == []
        builder.kill()
        for thread in threads:
            thread.join(60)
    finally:
        logging.getLogger(shared.__name__).removeHandler(handler)
        builder.kill()
        builder.communicate()
    assert [content(packed) for packed in found] == [True, True]
    assert len(re.findall("MiB packed into", caplog.text)) == 1


def test_a_slow_builder_is_left(path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shared, "_WAIT_S", 0.1)
    with subprocess.Popen(
        [sys.executable, "-c", BUILDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as builder:
        assert builder.stdout.readline() == b"half\n"
        assert content(share_weights(path, KEY, weights, 1))
        builder.kill()
    assert re.search(r"a worker \(process \d+ on .+\) builds it, with no progress for 0.1 s; this", caplog.text)


def test_a_waiting_worker_tells_for_which_worker_and_how_far_that_is(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_WAIT_S", 60.0)
    builder, waiter, go_on = LoadProgress("prefill-7"), LoadProgress("decode-0"), threading.Event()
    packing = threading.Event()

    def load() -> list[LoadedWeight]:
        builder.begin("reading and packing the weights", 8 << 20)
        first, *others = weights()

        def write(memory: torch.Tensor) -> None:
            builder.add(2 << 20)
            packing.set()
            assert go_on.wait(60)
            first.write(memory)

        return [LoadedWeight(first.name, first.elements, first.dtype, write), *others]

    found = []
    threads = [threading.Thread(target=lambda: found.append(share_weights(path, KEY, load, 1, builder)))]
    threads[0].start()
    try:
        assert packing.wait(60)
        threads.append(threading.Thread(target=lambda: found.append(share_weights(path, KEY, no_load, 1, waiter))))
        threads[1].start()
        while not re.fullmatch(
            rf"waiting for worker prefill-7 \(process {os.getpid()} on .+\), which packs the weights into "
            rf"{re.escape(path)}: 2 of 8 MiB \(25 %\)",
            str(waiter),
        ):
            threads[1].join(0.01)
        builder.add(4 << 20)
        while "6 of 8 MiB" not in str(waiter):
            threads[1].join(0.01)
    finally:
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert [content(packed) for packed in found] == [True, True]
    assert shared._describe("/proc/12/fd/4") == "the memory that `baton up` shares (process 12)"


def test_a_full_disk_shares_none(path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EFAULT, "Bad address")

    with monkeypatch.context() as patch:
        patch.setattr(shared, "populate", full)
        assert content(share_weights(path, KEY, weights, 1))
    assert "there is no space for" in caplog.text
    assert os.path.getsize(path) == 0
    assert content(share_weights(path, KEY, weights, 1))


@pytest.mark.parametrize("cases", [["limited"], ["full", "allocated", "full to the last page"]], ids=", ".join)
def test_a_worker_without_space_is_not_killed(tmp_path: Path, cases: list[str]) -> None:
    command = [sys.executable, "-c", CROWDED, f"{tmp_path}/packed", *cases]
    if cases != ["limited"]:
        mount = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
        mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount]
        if not shutil.which("unshare") or subprocess.run([*mounted, tmp_path, "true"], capture_output=True).returncode:
            pytest.skip("this user may mount no tmpfs")
        command = [*mounted, str(tmp_path), *command]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "".join(f"{case} True\n" for case in cases)), done.stderr
    reason = "File too large" if cases == ["limited"] else "No space left on device"
    warning = f"packed: there is no space for 8 MiB ({reason}); this worker holds a copy of its own"
    assert done.stderr.count(warning) == len(cases)


def test_kernels_that_can_not_populate_allocate(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(shared, "populate", unknown)
    assert content(share_weights(path, KEY, weights, 1))
    assert os.stat(path).st_blocks * 512 >= os.path.getsize(path)


@pytest.mark.parametrize(
    ("huge", "chosen"), [(("memfd", "disk"), "memfd"), (("disk",), "disk"), ((), "memfd")], ids=str
)
def test_the_shared_file_is_in_memory_unless_only_one_on_disk_gets_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge: tuple[str, ...], chosen: str
) -> None:
    def place(fd: int) -> str:
        return "memfd" if "memfd:" in os.readlink(f"/proc/self/fd/{fd}") else "disk"

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(mapping, "huge_pages_of", lambda fd: place(fd) in huge)
    fd = mapping.unnamed_file(tmp_path / "new" / "folder", 1000)
    found = place(fd)
    os.close(fd)
    assert found == chosen
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]
    # More than any disk holds.
    fd = mapping.unnamed_file(tmp_path, 1 << 62)
    assert place(fd) == "memfd"
    os.close(fd)


def test_a_probed_file_is_left_empty(tmp_path: Path) -> None:
    with (tmp_path / "probed").open("w+b") as file:
        mapping.huge_pages_of(file.fileno())
        assert os.fstat(file.fileno()).st_size == 0


def test_a_file_that_up_holds_open_but_its_children_may_not_open_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    weights = share_weights("/proc/1/fd/none-such", {}, list, 1)
    assert not weights.addresses
    assert "holds a copy of its own" in caplog.text
