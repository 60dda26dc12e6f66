"""Load on a server, and what its clients saw.

lengths      how long prompts and outputs are
workload     the requests themselves, drawn from a seed, and when they are due: Poisson, or as a trace has them
prompt_file  or those of a file
targets      who is asked; grpc_target is Baton, http_target any OpenAI-compatible server, connect chooses
outcome      what became of one request
runner       sends them, notes every event, counts its own lateness, lets nothing hang
report       outcomes in numbers
plots        reports as pictures
"""
