"""The decode service: one generation batch, refilled the moment a sequence leaves.

messages   what routers and the service say to each other, in plain Python
attempts   pure: attempts from reservation to end, and the pages they hold
admission  pure: how many sequences are taken on
scheduler  pure: which sequences wait for a slot, run, or are paused, and when one ends
ledger     pure: what attempts hold, for the ledger
loop       the engine thread: resume, admit, make room, step, emit
service    the asyncio side: sessions, reservations, the reports of the loop
session    what is to be told one router
fetches    a task for each transfer of KV, over `channels`
deadlines  a timer for each attempt
servicer   translates the Session stream
app        starts and stops everything
"""
