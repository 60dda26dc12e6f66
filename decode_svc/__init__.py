"""The decode service: reservations and KV come in, tokens go out; one generation batch for all requests.

Routers send Reserve, Start and Cancel on a session, and get tokens as soon as a step has made them. The service
fetches KV from prefill workers. When a sequence has finished, its slot goes to another one before the next step.

Read `worker` first: it has an attempt's life from top to bottom. Then read `loop`, which decodes. Pure modules use no
torch, gRPC or asyncio; the caller passes times.

worker       an attempt's life: reserve, fetch, commit, decode, end; ledger and failure of the worker
messages     pure: commands from a router and messages to it
session      the stream of messages to one router
write_backs  copies of ended sequences' blocks to the shared cache
loop         the engine thread: admit, make room, launch a step, read one, report
scheduler    pure: sequences that wait for a slot or run, and their ends
admission    pure: reservations and forks that wait for slots and pages, and the order in which they get them
reservation  pure: the size of a reservation, and its checks
attempts     pure: attempts from reservation to end, their pages and choices
load_meter   the worker's load, for its status and metrics
servicer     translation of the Session stream
app          starts, drains and stops everything
"""
