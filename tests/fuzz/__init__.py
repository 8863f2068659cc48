"""A fuzz test of the ops: any arguments, and each call gives the right answer or a Python exception that says why not.

    make fuzz ARGS="--calls 1000000"            a long run, about an hour on two cores
    make fuzz ARGS="--seed 7 --only 1234"       call 1,234 of seed 7 by itself: what it was, and what came of it

``worker.py`` draws a call from a seed and its number alone, and is the process that makes it, which may crash;
``spoil.py`` has what is done to a call's arguments, and ``raw.py`` to those of the ops themselves; ``verdict.py`` says
what is right; ``driver.py`` starts workers, again behind a crash, and groups what they find.
"""
