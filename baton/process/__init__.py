"""The life of a process: its start and end, its children, its threads, its cores and its memory.

service       a service from its settings to its exit status: start, serve, drain
supervisor    child processes: started, restarted when they die, ended with this one
executors     threads for work that is too long for an event loop, and the engine thread
sockets       sockets as servers bind them
ops           the HTTP listener for probes and metrics
cores         the cores that this process may use
allocator     settings of glibc's malloc: memory that is freed stays in the process
madvise       advice to the kernel: huge pages, and pages that it brings before they are used
"""
