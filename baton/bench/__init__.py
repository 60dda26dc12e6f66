"""Measurements that ship: what `baton bench` runs, and the harness that all benches share, those of `bench/` too.

children    processes, questions to them, the cores that they run on
load        requests to a server, and what their clients saw
pairing     turns: probes between runs, orders of rounds, ratios, failures
stats       percentiles
machine     what the machine is, CPU time, memory, time that the host stole
results     what results are of, and the file that they go to
interrupts  Ctrl-C keeps what is complete

The rest belongs to one command each: engine*, probes and roofline.
"""
