"""Write the instance library to ``benchmarks/instances`` and its table of best known results.

``python -m benchmarks.make_instances`` writes the files; ``--solve SECONDS`` also solves each and keeps, in
``best.json``, the shortest makespan and the highest bound ever seen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeloom.io import write_instance, write_text
from pipeloom.report import markdown_table
from pipeloom.search import Budget, compile_kernels, solve
from pipeloom.timeline import require_feasible
from pipeloom_instances import LIBRARY, instance

HERE = Path(__file__).parent / "instances"
LARGE = (
    "vlm-l-k2",
    "vlm-l-k2-m1.5",
    "vlm-l-ckpt-k2-m1.5",
    "vlm-xl",
    "vlm-xl-ckpt-m1.5",
    "t2v-l",
    "t2v-l-m1.5",
    "vlm-s-strategies-m1.5",
    "vlm-s-strategies-m4",
    "t2v-s-strategies-m1.5",
)
"""Too large to keep as files; their names are enough to make them."""
BEGIN, END = "<!-- best -->\n", "<!-- end -->\n"


def main() -> None:
    """Write files, and update the table if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--solve", type=float, metavar="SECONDS", help="CPU seconds for each instance")
    parser.add_argument("--seeds", type=int, default=1, help="instances of each family (default 1)")
    parser.add_argument("--family", nargs="*", default=list(LIBRARY), help="only these (default: all)")
    options = parser.parse_args()
    compile_kernels()
    HERE.mkdir(exist_ok=True)
    table_file = HERE / "best.json"
    table: dict[str, Any] = json.loads(table_file.read_text()) if table_file.exists() else {}
    for kind in options.family:
        for seed in range(options.seeds):
            name = f"{kind}/{seed}"
            graph = instance(name)
            if kind not in LARGE:
                write_instance(HERE / f"{kind}-{seed}.json.gz", graph)
            if options.solve is None:
                continue
            found = solve(graph, budget=Budget(seconds=options.solve, clock="cpu"), seed=seed)
            require_feasible(graph, found.schedule, found.timeline)
            entry = table.setdefault(name, {"makespan_ns": found.timeline.makespan_ns, "bound_ns": 0, "bound": ""})
            entry["tasks"] = graph.num_tasks
            entry["makespan_ns"] = min(entry["makespan_ns"], found.timeline.makespan_ns)
            if found.lower_bound.ns >= entry["bound_ns"]:
                entry["bound_ns"], entry["bound"] = found.lower_bound.ns, found.lower_bound.name
            entry["gap_percent"] = round(100 * (entry["makespan_ns"] / entry["bound_ns"] - 1), 3)
            print(name, entry, flush=True)
            table_file.write_text(json.dumps(table, indent=1) + "\n")
    write_readme(table)


def write_readme(table: dict[str, Any]) -> None:
    """Renew the table of best known results in the library's README."""
    rows = []
    for kind in LIBRARY:
        for name, entry in table.items():
            if name.partition("/")[0] == kind:
                optimal = "optimal" if entry["makespan_ns"] <= entry["bound_ns"] else f"{entry['gap_percent']:.3f}"
                rows.append(
                    [
                        name,
                        str(entry["tasks"]),
                        f"{entry['makespan_ns'] / 1e9:.6f}",
                        f"{entry['bound_ns'] / 1e9:.6f}",
                        entry["bound"],
                        optimal,
                    ]
                )
    header = ["instance", "tasks", "best makespan, s", "best bound, s", "bound by", "gap, %"]
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    write_text(readme, f"{before}{BEGIN}{markdown_table(header, rows)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
