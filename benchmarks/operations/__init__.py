"""What single operations ask of the allocator, on a card and on the virtual one, request by request.

    python -m benchmarks.operations record card.jsonl.gz                     # on a machine with a CUDA GPU
    python -m benchmarks.operations record virtual.jsonl.gz --gpu H100       # anywhere
    python -m benchmarks.operations compare virtual.jsonl.gz card.jsonl.gz

Both sides run the very same functions, those of `cases`. A record is JSON, a line a case. `requests` are bytes, +asked
for and -released, in their order, 0 between forward and backward; `peak` and `reserved` are what was allocated and
reserved at most beyond what was there before; a case that raised has an `error`.
"""
