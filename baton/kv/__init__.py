"""KV as memory and as bytes: pages of one worker, the format that all workers share, and names of prefix blocks.

format    the parts, layers and blocks of KV on the wire and in caches; read it first
pool      owners of pages, and free pages; `cached_blocks` finds pages by their content
hashing   digests of prefix blocks
prefix/   the prefix cache beyond the pages: host memory, Redis
embedded  the Valkey that `baton up` starts
"""
