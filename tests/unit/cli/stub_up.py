"""`baton up` with stubs in the services' place, and the stubs; run as a script.

stub_up.py up …              `baton up`, its services being this script
stub_up.py service ROLE …    a stub; the variable STUB_<ROLE> says how it behaves:
    "" serves until SIGTERM · "die" says why and ends with status 3 · "mute" never listens, and ignores SIGTERM
    · "busy" drains after SIGTERM, until SIGUSR1 or a second SIGTERM · "absent" says that it listens, and does not
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


def up() -> None:
    from baton.cli import up

    up._SAY_S = 1.0
    for role in up.COMMANDS:
        up.COMMANDS[role] = [sys.executable, __file__, "service", role]
    up.up.main(sys.argv[2:])


def service(role: str) -> None:
    way = os.environ.get(f"STUB_{role.upper()}", "")
    print(f"pid={os.getpid()} argv={' '.join(sys.argv[3:])}", file=sys.stderr, flush=True)
    print(f"redis={os.environ['BATON_REDIS']} secret={len(os.environ['BATON_FLEET_SECRET'])}", flush=True)
    if way == "die":
        print("the checkpoint is damaged", file=sys.stderr, flush=True)
        sys.exit(3)
    if way == "refuse":
        print(f"{role}: device: cuda is not available", file=sys.stderr, flush=True)
        sys.exit(2)
    if way == "mute":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    asyncio.run(serve(role, busy=way == "busy", absent=way == "absent"))


async def serve(role: str, *, busy: bool, absent: bool) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def drain() -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            loop.add_signal_handler(number, end, number.name)
        print("drains", file=sys.stderr, flush=True)

    def end(why: str) -> None:
        print(f"stops after {why}", file=sys.stderr, flush=True)
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, *([drain] if busy else [end, "SIGTERM"]))
    if role != "router" or absent:
        print("listening grpc=127.0.0.1:1 control=127.0.0.1:1 kv=127.0.0.1:2 ops=127.0.0.1:3", flush=True)
        await stop.wait()
        return
    from baton.rpc.server import listen

    async with listen("127.0.0.1:0", insecure=False, add=lambda server: None, services=[]) as listener:
        print(f"listening grpc={listener.address} ops=127.0.0.1:3", flush=True)
        listener.set_serving(True)
        await stop.wait()


if __name__ == "__main__":
    up() if sys.argv[1] == "up" else service(sys.argv[2])
