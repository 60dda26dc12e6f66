"""Load on a server, and the latencies that its clients see.

lengths      how long prompts and outputs are
workload     the requests themselves, drawn from a seed, and when they are due: Poisson, or as a trace has them
prompt_file  requests from a file; traces reads arrivals from one
targets      the servers; grpc_target is Baton, http_target any OpenAI-compatible server, connect chooses
outcome      the result of one request
runner       sends requests, records every event and its own delays, and ends in bounded time
report       outcomes in numbers
"""
