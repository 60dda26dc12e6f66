"""Load on a server, and what its clients saw.

arrivals     when requests are due: Poisson, a trace, or as soon as another has ended
lengths      how long prompts and outputs are
workload     the requests themselves, drawn from a seed
prompt_file  or those of a file
targets      who is asked: Baton over gRPC, or any OpenAI-compatible server over HTTP
outcome      what became of one request
cap          no more than so many in flight
runner       sends them, notes every event, counts its own lateness, lets nothing hang
report       outcomes in numbers
plots        reports as pictures
"""
