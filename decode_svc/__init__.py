"""The decode service: one generation batch, refilled the moment a sequence leaves.

messages   what routers and the service say to each other, in plain Python
attempts   pure: attempts from reservation to end, and the pages they hold
scheduler  pure: which sequences wait for a slot, which run, and when one ends
loop       the engine thread: admit, step, emit
service    the asyncio side: sessions, fetches, deadlines, the reports of the loop
servicer   translates the Session stream
app        starts and stops everything
"""
