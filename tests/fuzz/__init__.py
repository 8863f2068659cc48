"""A fuzz test of the ops: with any arguments a call must return right results or raise a Python exception that explains
the reason.

    make fuzz ARGS="--calls 1000000"            a long run, about an hour on two cores
    make fuzz ARGS="--seed 7 --only 1234"       call 1,234 of seed 7 alone: prints its arguments and its finding

``worker.py`` draws a call from the seed and the call's number, and runs it in a process that may crash. ``spoil.py``
spoils the arguments of public functions, and ``raw.py`` those of the ops themselves. ``verdict.py`` defines right
results and acceptable exceptions. ``driver.py`` starts workers, restarts them after a crash, and groups their findings.
"""
