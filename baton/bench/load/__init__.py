"""Load on a server, and the latencies that its clients see.

workload     the requests themselves, drawn from a seed: prompts, lengths, and when they are due
prompt_file  requests from a file
targets      the servers; grpc_target is Baton, http_target any OpenAI-compatible server, connect chooses
outcome      the result of one request
runner       sends requests, records every event and its own delays, and ends in bounded time
report       outcomes in numbers
"""
