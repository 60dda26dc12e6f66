"""The decode service: one generation batch, refilled the moment a sequence leaves.

messages   what routers and the service say to each other, in plain Python
attempts     pure: attempts from reservation to end, and the pages they hold
reservation  pure: what a reservation takes, and whether it can ever be granted
admission    pure: how many sequences are taken on
scheduler    pure: which sequences wait for a slot, run, or are paused, and when one ends
block_hasher pure: the names of a sequence's blocks
ledger       pure: what attempts hold, for the ledger
loop         the engine thread: resume, admit, make room, step, emit
service      the asyncio side: sessions, reservations, the reports of the loop
session      what is to be told one router
fetches      a task for each transfer of KV
prefixes     exports of what attempts have pinned
write_backs  copies of ended sequences' blocks to the shared cache
deadlines    a timer for each attempt
load         how the worker fares
servicer     translates the Session stream
app          starts and stops everything
"""
