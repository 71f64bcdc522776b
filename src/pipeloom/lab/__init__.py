"""The laboratory: baselines, exact solvers, tree searches, instance families and the papers' evaluations.

The product never imports it; the command line does. Importing it names its searches and exact solvers to
`pipeloom.search.solve`.
"""

import pipeloom.lab.solvers  # noqa: F401  registers them
