"""Measurements that users make with `baton bench`; those of Baton itself are in `bench/`, and build on this.

load        requests to a server, and what their clients saw: `baton bench serve`
engine      runs of an engine; engine_report, probes and roofline compare them with the machine: `baton bench engine`
stats       percentiles
machine     what the machine is, memory, time that the host stole
results     what results are of, and the file that they go to
interrupts  Ctrl-C keeps what is complete
"""
