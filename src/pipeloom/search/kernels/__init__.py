"""Compiled loops of the search: dual-queue list scheduling, and local search around it.

List scheduling (`dip.txt` §5.2) goes through time. Of all ranks that could start something, it takes the one that
could start first, and there chooses between the best forward and the best backward that are ready. Where
memory is limited, a task that would not fit, or after which some begun component could no longer finish, is passed
over (`banker`). Nothing here allocates; `Scratch` holds what it writes.
"""
