"""Measurements that users make with `baton bench`; those of Baton itself are in `bench/`, and build on this.

load        requests to a server, and the latencies that its clients see: `baton bench serve`
engine      runs of an engine; engine_report and probes compare them with the machine: `baton bench engine`
stats       percentiles
machine     facts about a measurement: machine, commit, memory, CPU time that the host took; the file of results
interrupts  Ctrl-C keeps the complete results
"""
