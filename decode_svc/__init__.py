"""The decode service: reservations and KV come in, tokens go out; one generation batch for all requests.

Routers send Reserve, Start and Cancel on a session, and get one message for each step. The service fetches KV from
prefill workers. When a sequence has finished, its slot goes to another one before the next step.

Read `worker` first: it has an attempt's life from top to bottom. Then read `loop`, which decodes.

worker       an attempt's life: reserve, fetch, commit, decode, end; the load of the worker
session      commands from a router and messages to it
write_backs  copies of ended sequences' blocks to the shared cache
loop         the engine thread: admit, make room, launch a step, read one, report
scheduler    pure: which sequences wait for a slot or run, and when one ends
admission    pure: which reservation or fork gets a slot and pages next; claims of large ones
reservation  pure: a request for pages, its size and its checks
attempts     pure: attempts from reservation to end, their pages and choices
servicer     translates the Session stream
app          starts and stops everything; engine thread, status, ledger, drain
"""
