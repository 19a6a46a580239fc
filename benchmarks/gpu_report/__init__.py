"""One report of a machine with GPUs, which whoever has one makes by one command and sends back (`make gpu`).

    python -m benchmarks.gpu_report [--parts NAME …] [--rehearse] [--out FILE]

A *part* (`parts.py` has the table) is a module with two functions: `measure(machine)` gives names and records, one after the
other, `lines(record)` says them in words. Each runs in a process of its own (`separate.py`) with a limit in seconds: what it
gave before it failed or ran late stays, and why it ended is in the report, which is one JSON file. A rehearsal goes the same
ways without a GPU: Gloo, tiny models, the processor in the place of a GPU; its numbers say nothing. `truths.py` takes what
comes back into the tests.
"""
