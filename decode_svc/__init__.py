"""The decode service: reservations and KV come in, tokens go out; one generation batch for all requests.

Routers send Reserve, Start and Cancel on a session, and get one message a step. KV is pulled from prefill workers. When
a sequence has finished, the next one gets its slot before the next step.

Read `worker` first: it has an attempt's life from top to bottom. Then read `loop`, which decodes.

worker       an attempt's life: reserve, fetch, commit, decode, end; sessions, load, copies to the shared cache
loop         the engine thread: admit, make room, launch a step, read one, report
scheduler    pure: which sequences wait for a slot or run, and when one ends
admission    pure: which reservation or fork gets a place and pages next; claims of large ones
attempts     pure: attempts from reservation to end, their pages and choices
servicer     translates the Session stream
app          starts and stops everything; engine thread, status, ledger, drain
"""
