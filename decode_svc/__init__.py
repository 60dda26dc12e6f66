"""The decode service: reservations and KV come in, tokens go out; one generation batch for all requests.

Routers send Reserve, Start and Cancel on a session, and get one message a step. KV is pulled from prefill workers.
A finished sequence's slot goes to the next one before the next step.

Read `worker` first: an attempt's life is there from top to bottom. Then `loop`, which decodes.

worker       an attempt's life: reserve, fetch, commit, decode, end; sessions
loop         the engine thread: resume, admit, make room, launch a step, read one, report
scheduler    pure: which sequences wait for a slot, run, or are paused, and when one ends
admission    pure: who gets a place and pages next; claims: pages set aside for large requests
attempts     pure: what happens to an attempt's pages and choices, from reservation to end
sequence     pure: an attempt, its choices, and the sequences that decode them
session      what is to be told one router; messages: what is said, as plain types
service      the process around the worker: engine thread, status, ledger, drain
write_backs  copies of ended sequences' blocks to the shared cache
servicer     translates the Session stream
app          starts and stops everything
"""
