"""Arithmetic of what a model needs and what a machine can reach: sizes enter, bytes, seconds and FLOP/s leave.

shape          sizes of a model, and counts of its parameters; read this first
memory         bytes of weights, KV and workspace, and the tokens and sequences that a memory holds
hardware       rates and sizes of devices, with their sources
roofline       operations, bytes and least seconds of a prefill and of a decode step
communication  bytes and seconds between devices that share a model

Pure functions in SI base units: bytes, seconds, FLOP/s. Integers where a figure is exact. The commands are in
`baton/cli/plan`.
"""
