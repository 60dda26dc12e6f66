"""Load on a server, and the latencies that its clients see.

workload     the requests themselves, drawn from a seed or read from a file: prompts, lengths, and when they are due
targets      the servers: Baton, and with http_target any OpenAI-compatible server
outcome      the result of one request
runner       sends requests, records every event and its own delays, and ends in bounded time
report       outcomes in numbers, and on the terminal
session      a whole measurement: waits for the server, warms it up, runs each load
"""
