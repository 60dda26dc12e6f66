"""Measurements that users make with `baton bench`; those of Baton itself are in `bench/`, and build on this.

load        requests to a server, and the latencies that its clients see: `baton bench serve`
engine      runs of an engine; engine_report, probes and roofline compare them with the machine: `baton bench engine`
stats       percentiles
machine     description of the machine, memory, CPU time that the host took
results     machine and commit of results, and their file
interrupts  Ctrl-C keeps the complete results
"""
