"""Measurements that users make with `baton bench`; those of Baton itself are in `bench/`, and build on this.

engine      runs of an engine; engine_report and probes compare them with the machine: `baton bench engine`
machine     facts about a measurement: machine, commit, memory, CPU time that the host took; the file of results
interrupts  Ctrl-C keeps the complete results
"""
