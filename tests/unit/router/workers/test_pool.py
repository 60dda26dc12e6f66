"""Workers that a pool watches, and addresses that it keeps dialling."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from baton.config.router import RouterConfig
from baton.errors import Unavailable
from baton.kv.format import KvFormat
from baton.kv.hashing import NAME_BYTES, PackedDigests
from baton.pb.worker_pb2_grpc import add_WorkerServicer_to_server
from baton.request import CachePolicy
from baton.rpc.server import listen
from baton.worker.status import PrefixChange, StatusHub, WorkerIdentity, WorkerLoad, WorkerRole, WorkerServicer
from router.placement.prefix_directory import BlockNamespace
from router.workers import link as link_module
from router.workers.failures import Blame, Cause, Event, FailureEvent
from router.workers.link import WorkerLink
from router.workers.pool import WorkerPool
from tests.property.fleet import SimulatedFleet, Worker
from tests.property.virtual import VirtualLoop
from tests.unit.router.dispatching import KV


async def test_each_status_is_news_for_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.worker.status.MAX_INTERVAL_S", 0.05)
    identity = WorkerIdentity("p", WorkerRole.PREFILL, "i", "m", "f", KV, False, "t", 64, (KV.whole,))
    status = StatusHub(identity, WorkerLoad)

    def add(server: object) -> None:
        add_WorkerServicer_to_server(WorkerServicer(status), server)

    async with listen("127.0.0.1:0", insecure=False, add=add, services=[], grace=0) as listener:
        status.advertise(":1")
        config = RouterConfig(prefill=(listener.address,), decode=("127.0.0.1:1",), served_model_name="m")
        pool = WorkerPool(config, "router", "t")
        news, identities = list[None](), set()
        pool.subscribe(lambda: news.append(None))
        async with asyncio.timeout(60), pool.run():
            while len(news) < 5:
                identities.update(each.incarnation for each in pool.identities)
                await asyncio.sleep(0.01)
        status.close()
    assert identities == {"i"}


async def test_a_worker_that_is_listed_again_while_it_is_given_up_is_dialled_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    pool = WorkerPool(RouterConfig(prefill=("dns:///workers:1",), decode=("127.0.0.1:1",)), "router", "")
    found = pool._finder(WorkerRole.PREFILL)
    found({address})
    link, watching = pool._links[WorkerRole.PREFILL, address]
    close, closing, listed = link.channel.close, asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        closing.set()
        await listed.wait()
        await close()

    link.channel.close = slowly
    async with asyncio.timeout(60):
        # Nobody listens there, so the watch ends, and with it what is not listed.
        found(set())
        await closing.wait()
        found({address})
        listed.set()
        await watching
        await asyncio.sleep(0)
    again, dialling = pool._links[WorkerRole.PREFILL, address]
    assert again is not link
    dialling.cancel()
    await asyncio.gather(dialling, return_exceptions=True)
    assert not pool._links


async def test_a_new_worker_that_does_not_listen_yet_is_no_warning_until_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    pool = WorkerPool(RouterConfig(prefill=(address,), decode=(address,)), "router", "")
    async with asyncio.timeout(60), pool.run():
        while caplog.text.count("does not listen yet") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        links = [link for link, _ in pool._links.values()]
        for link in links:
            link._log_absence("again")
        assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
        for link in links:
            link._expected_by = 0.0
        while caplog.text.count("has not listened for 600 s") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for link in links:
            link._log_absence("again")
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING", "WARNING"]


class Fleet(SimulatedFleet):
    """Workers of all roles in simulated time."""

    def __init__(self, **counts: int) -> None:
        super().__init__(0, 0)
        for role in WorkerRole:
            for number in range(counts.get(role.value, 0)):
                worker = Worker(self, role, f"{role.value}-{number}:1")
                self.workers[worker.address] = worker

    @contextlib.asynccontextmanager
    async def pool(self, **flags: tuple[str, ...]) -> AsyncIterator[WorkerPool]:
        """A pool that watches all workers, or those at the addresses in `flags`, after its first seconds."""
        found = {role.value: tuple(w.address for w in self.workers.values() if w.role is role) for role in WorkerRole}
        pool = WorkerPool(RouterConfig(**(flags or found), served_model_name="m"), "router", "t")
        async with pool.run():
            await asyncio.sleep(3.0)
            yield pool


def in_simulated_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    monkeypatch.setattr(link_module, "control_channel", fleet.channel)
    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(run())
    assert loop.faults == []


def test_a_mixed_worker_has_one_link_and_a_view_for_each_role(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(mixed=1)

    async def run() -> None:
        async with fleet.pool() as pool:
            (watches,) = [worker.watches for worker in fleet.workers.values()]
            assert len(watches) == 1
            prefill, decode = pool.fleet.prefill["mixed-0:1"], pool.fleet.decode["mixed-0:1"]
            assert prefill.incarnation == decode.incarnation == "mixed-0:1#0"
            link = pool.prefill_link("mixed-0:1")
            assert link is pool.decode_link("mixed-0:1")
            assert link.session is not None
            assert pool.serving
            assert [each.role for each in pool.identities] == [WorkerRole.MIXED]
            assert pool.capacity(WorkerRole.PREFILL) == pool.capacity(WorkerRole.DECODE) == 1024
            assert len(pool.loads(WorkerRole.DECODE)) == len(pool.loads(WorkerRole.PREFILL)) == 1
            link.assign(100)
            link.subtract_free(160, 2)
            assert pool.fleet.prefill["mixed-0:1"].open_tokens == 100
            assert pool.fleet.decode["mixed-0:1"].free_tokens == 1024 - 160
            fleet.workers["mixed-0:1"].draining = True
            fleet.workers["mixed-0:1"].changed()
            await asyncio.sleep(0.1)
            assert not pool.serving
            assert "no prefill and no decode worker is there" in pool.describe_missing()
        assert not pool.fleet.prefill.keys() | pool.fleet.decode.keys()
        with pytest.raises(KeyError):
            pool.prefill_link("mixed-0:1")
        assert pool.decode_link("mixed-0:1") is None

    in_simulated_time(fleet, monkeypatch, run)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_death_of_a_mixed_worker_is_one_loss_for_both_roles(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, events = Fleet(mixed=1, decode=1), dict[str, list[Event]]()

    async def run() -> None:
        async with fleet.pool() as pool:
            link = pool.prefill_link("mixed-0:1")

            async def decode(request_id: str, *, spoken: bool) -> None:
                assert link.session is not None
                call = link.session.begin_call(request_id, 0, 0, events.setdefault(request_id, []).append)
                asked = {"context_tokens": 1, "max_new_tokens": 1, "choices": (0,), "deadline_ms": 1, "salt": b""}
                answer = asyncio.get_running_loop().create_future()
                call.reserve(answer.set_result, **asked, cache=CachePolicy.OFF, prefix_digests=b"")
                assert (await answer).granted
                call.keep()
                call.has_output = spoken

            def prefill(request_id: str) -> None:
                link.assign(10).add_suspect(request_id, events.setdefault(request_id, []).append)

            await decode("speaks", spoken=True)
            if in_place:
                await decode("in place", spoken=False)
                prefill("in place")
            prefill("for another")
            assert link._requests_without_token() == 1 + in_place
            fleet.workers["mixed-0:1"].die()
            await asyncio.sleep(0.5)
            (loss,) = pool.losses._losses
            assert (loss.label, loss.suspect_share) == ("mixed mixed-0:1", 1 / (1 + in_place))
            failures = {name: [each for each in of if isinstance(each, FailureEvent)] for name, of in events.items()}
            assert {each.cause for of in failures.values() for each in of} == {Cause.LOST}
            assert [each.loss for each in failures["speaks"]] == [None]
            found = [(each.blame, each.loss) for each in failures.pop("in place", [])]
            assert found == [(Blame.PREFILL, loss), (Blame.DECODE, loss)] * in_place
            assert [(each.blame, each.loss) for each in failures["for another"]] == [(Blame.PREFILL, loss)]
            assert list(pool.fleet.decode) == ["decode-0:1"]
            assert not pool.fleet.prefill
            with pytest.raises(Unavailable, match="mixed worker mixed-0:1 is lost"):
                link.assign(1)

    in_simulated_time(fleet, monkeypatch, run)


def test_a_session_that_breaks_before_the_watch_is_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(mixed=1)

    async def run() -> None:
        async with fleet.pool() as pool:
            link, events = pool.prefill_link("mixed-0:1"), list[Event]()
            link.assign(10).add_suspect("r", events.append)
            worker = fleet.workers["mixed-0:1"]
            watch, session = worker.watches[0], next(call for call in worker.calls if call not in worker.watches)
            session.fail(link_module.grpc.StatusCode.UNAVAILABLE)
            await asyncio.sleep(0.01)
            assert pool.losses._losses[0].suspect_share == 1.0
            worker.up = False
            watch.fail(link_module.grpc.StatusCode.UNAVAILABLE)
            await asyncio.sleep(0.01)
            (loss,) = pool.losses._losses
            (event,) = events
            assert isinstance(event, FailureEvent)
            assert event.loss is loss

    in_simulated_time(fleet, monkeypatch, run)


def test_a_worker_whose_session_breaks_has_no_view_when_its_attempts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are placed anew at once. To count a prompt at a mixed worker would remove the view in the middle of that."""
    fleet = Fleet(mixed=1)

    async def run() -> None:
        async with fleet.pool() as pool:
            link, views = pool.prefill_link("mixed-0:1"), list[int]()
            assert link.session is not None
            link.session.begin_call("r", 0, 0, lambda _: views.append(len(pool.fleet.decode)))
            worker = fleet.workers["mixed-0:1"]
            session = next(call for call in worker.calls if call not in worker.watches)
            session.fail(link_module.grpc.StatusCode.UNAVAILABLE)
            await asyncio.sleep(0.01)
            assert views == [0]
            link.assign(10)

    in_simulated_time(fleet, monkeypatch, run)


def test_prefixes_of_a_mixed_worker_count_for_both_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, namespace = Fleet(mixed=1), BlockNamespace("f" * 64, KV.digest, 16)
    digests = {namespace: PackedDigests(b"".join(bytes([i] * 32) for i in range(4)))}
    stored = tuple(digest[:NAME_BYTES] for digest in digests[namespace])

    async def run() -> None:
        async with fleet.pool() as pool:
            pool.update_prefixes(pool.prefill_link("mixed-0:1"), PrefixChange(True, stored, ()))
            assert pool.prefixes.match_prefill(digests).tokens("mixed-0:1") == 64
            assert pool.prefixes.match_decode(digests).tokens("mixed-0:1") == 64
            fleet.workers["mixed-0:1"].die()
            await asyncio.sleep(0.05)
            assert pool.prefixes.match_prefill(digests).tokens("mixed-0:1") == 0
            assert pool.prefixes.match_decode(digests).tokens("mixed-0:1") == 0

    in_simulated_time(fleet, monkeypatch, run)


@pytest.mark.parametrize("flag", ["prefill", "decode"])
def test_a_worker_in_the_list_of_another_role_is_refused_by_name(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It also stays in service if it is in the right list too."""
    fleet = Fleet(mixed=1)

    async def run() -> None:
        async with fleet.pool(**{flag: ("mixed-0:1",), "mixed": ("mixed-0:1",)}) as pool:
            problem = f"{flag} worker mixed-0:1 at mixed-0:1 is refused: its role is 'mixed', but the list of --{flag}"
            assert problem in pool.describe_missing()
            wrong, right = (pool._links[WorkerRole(role), "mixed-0:1"][0] for role in (flag, "mixed"))
            for link in (right, wrong):
                pool.update_worker(link)
            assert pool.prefill_link("mixed-0:1") is pool.decode_link("mixed-0:1") is right
            assert pool.serving
            pool.update_prefixes(right, PrefixChange(True, (b"a" * NAME_BYTES,), ()))
            await pool.forget_prefixes(wrong)
            assert [tier.blocks for tier in await pool.prefixes.tiers()] == [1]
            fleet.workers["mixed-0:1"].die()
            await asyncio.sleep(0.05)
            assert not pool.serving

    in_simulated_time(fleet, monkeypatch, run)


def test_the_status_of_a_refused_worker_looks_at_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rollout, many wait for the workers that serve to leave."""
    fleet, looked = Fleet(prefill=5, decode=5, mixed=1), list[str]()
    real, mismatch = Worker.status.fget, WorkerPool._mismatch
    assert real is not None

    def status(worker: Worker) -> object:
        told = real(worker)
        return replace(told, identity=replace(told.identity, fingerprint="g" * 64)) if worker.mixed else told

    def look(pool: WorkerPool, link: WorkerLink, identity: WorkerIdentity) -> str | None:
        looked.append(link.address)
        return mismatch(pool, link, identity)

    monkeypatch.setattr(Worker, "status", property(status))

    async def run() -> None:
        async with fleet.pool() as pool:
            assert "its fingerprint is" in pool.describe_missing()
            monkeypatch.setattr(WorkerPool, "_mismatch", look)
            groups = pool.fleet.compatible_groups
            await asyncio.sleep(10.0)
            assert set(looked) == {"mixed-0:1"}
            assert pool.fleet.compatible_groups is groups
            for worker in fleet.workers.values():
                if not worker.mixed:
                    worker.die()
            await asyncio.sleep(5.0)
            assert list(pool.fleet.prefill) == ["mixed-0:1"]

    in_simulated_time(fleet, monkeypatch, run)


def test_a_worker_that_drains_or_is_lost_changes_no_view_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, looked = Fleet(prefill=5, decode=5), list[str]()

    async def run() -> None:
        async with fleet.pool() as pool:
            pool.prefill_link("prefill-0:1").assign(10)
            await asyncio.sleep(1.5)
            monkeypatch.setattr(pool, "_mismatch", lambda link, identity: looked.append(link.address))
            fleet.workers["prefill-0:1"].draining = True
            await asyncio.sleep(10.0)
            assert (looked, pool.fleet.prefill["prefill-0:1"].draining) == ([], True)
            views = {address: id(view) for address, view in pool.fleet.decode.items()}
            fleet.workers["prefill-0:1"].die()
            await asyncio.sleep(0.05)
            assert (looked, "prefill-0:1" in pool.fleet.prefill) == ([], False)
            assert {address: id(view) for address, view in pool.fleet.decode.items()} == views

    in_simulated_time(fleet, monkeypatch, run)


@pytest.mark.parametrize("role", list(WorkerRole))
def test_workers_of_all_roles_must_have_one_kv_format(role: WorkerRole, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, other = Fleet(mixed=1), KvFormat(KV.parts, layers=2, block_size=32)
    odd = Worker(fleet, role, "odd:1")
    real = Worker.status.fget
    assert real is not None

    def status(worker: Worker) -> object:
        told = real(worker)
        identity = replace(told.identity, kv_format=other, shards=(replace(other.whole, kv_address=":7001"),))
        return replace(told, identity=identity) if worker is odd else told

    monkeypatch.setattr(Worker, "status", property(status))

    async def run() -> None:
        async with fleet.pool() as pool:
            await asyncio.sleep(1.0)
            fleet.workers["odd:1"] = odd
            pool._finder(role)({"odd:1", *(["mixed-0:1"] if role is WorkerRole.MIXED else [])})
            await asyncio.sleep(2.0)
            assert f"{role.value} worker odd:1 at odd:1 is refused: its KV format is" in pool.describe_missing()
            assert list(pool.fleet.prefill) == list(pool.fleet.decode) == ["mixed-0:1"]

    in_simulated_time(fleet, monkeypatch, run)


@pytest.mark.parametrize(("before", "after"), [("prefill", "decode"), ("mixed", "prefill"), ("decode", "mixed")])
def test_a_worker_that_comes_back_in_another_role_has_no_view_of_the_old_one(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is listed for both roles, and the link of the new one hears of it first."""
    fleet = Fleet(**{before: 1})
    (worker,) = fleet.workers.values()
    new = WorkerRole(after)

    async def run() -> None:
        async with fleet.pool(**{before: (worker.address,), after: (worker.address,)}) as pool:
            worker.role, worker.born = new, 1
            pool._links[new, worker.address][0]._update_status(worker.status)
            assert len(pool._accepted) == 2
            await asyncio.sleep(5.0)
            assert len(pool._accepted) == 1
            assert (worker.address in pool.fleet.prefill, worker.address in pool.fleet.decode) == (
                new.prefills,
                new.decodes,
            )
            assert {view.incarnation for view in (*pool.fleet.prefill.values(), *pool.fleet.decode.values())} == {
                worker.status.identity.incarnation
            }

    in_simulated_time(fleet, monkeypatch, run)
